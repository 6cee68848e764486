"""The page of a study with three sizes and a replica."""

import html.parser
import json
import re
from pathlib import Path

from programs import call_main
from studies import RESULT

from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.report.page import page
from megalowbit.pretrain.sweep.study.study_file import read_study
from megalowbit.pretrain.sweep.study.texts import write_text

ROOT = Path(__file__).parents[5]


class Reader(html.parser.HTMLParser):
    """Collects tags, and checks that they close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_has_a_row_and_a_line_for_each_recipe(study, tmp_path, capsys):
    raw = json.loads(study.read_text())
    raw["sizes"] = [
        {"name": f"w{width}", "set": {"megalowbit.model.overrides": {"n_embd": width}}}
        for width in (32, 48, 64)
    ]
    raw["replicas"] = [{"name": "again", "of": "nvfp4", "lr_factor": 1.000001}]
    study.write_text(json.dumps(raw))
    out = tmp_path / "a&b"
    cells = cells_of(read_study(study), out, ROOT / "launch" / "pretrain.py")
    (facts,) = (write_text(t, cells[0].text_folder, heldout_bytes=3000) for t in read_study(study).texts)
    made_with = {**RESULT["made_with"], "processor": "<one>"}
    for cell in cells:
        gap = 0.0 if cell.label == "bf16" else 0.01 + 0.001 * cell.seed
        settings = cell.settings(facts)
        cell.write("cell.json", settings)
        made = {"settings": settings, "losses": [3.0 + gap] * 8, "made_with": made_with}
        cell.write("result.json", {**RESULT, **made})
    done = call_main("tools/study.py", study, "--out", out, "--report", capsys=capsys)
    assert done.returncode == 0, done.stderr
    text = (out / "study.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert "script" not in reader.tags
    assert reader.links == []
    assert "a&amp;b" in text
    assert "&lt;one&gt;" in text
    assert "<one>" not in text
    assert reader.tags.count("polyline") == 3 + 1  # a size each, and the law over sizes
    assert reader.tags.count("tr") == 3 * (1 + 1 + 1) + (1 + 1) + 3 * (1 + 2)  # gaps, law, costs
    assert len(re.findall('class="interval c0"', text)) == 3 + 1
    assert "18 cells: commit <code>abc</code>" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert "max-width: 40rem" in text
    data = json.loads((out / "study.json").read_text())
    assert "no pair is finished" in page("empty", [], [], [], data)
