"""A study of three sizes: its parameters, its power law, and where the report has them."""

import json
import random
from pathlib import Path

import pytest
from programs import call_main
from studies import RESULT

from launchers import write_config
from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.report.sizes import count_parameters
from megalowbit.pretrain.sweep.study.results import made_with
from megalowbit.pretrain.sweep.study.study_file import read_study
from megalowbit.pretrain.sweep.study.texts import write_text

ROOT = Path(__file__).parents[5]
WIDTHS = {"small": 32, "middle": 64, "large": 128}


def parameters_of(width):
    """Of GPT-2 with two blocks, 256 tokens and 64 positions; the head is tied."""
    block = 12 * width * width + 13 * width
    return (256 + 64) * width + 2 * block + 2 * width


@pytest.fixture
def three_sizes(study, tmp_path):
    """Path of a study with results whose gap falls as the square root of the size."""
    raw = json.loads(study.read_text())
    raw["sizes"] = [
        {"name": name, "set": {"megalowbit.model.overrides": {"n_embd": width}}}
        for name, width in WIDTHS.items()
    ]
    raw["seeds"] = [1, 2, 3, 4]
    study.write_text(json.dumps(raw))
    cells = cells_of(read_study(study), tmp_path / "out", ROOT / "launch" / "pretrain.py")
    (facts,) = (write_text(t, cells[0].text_folder, heldout_bytes=3000) for t in read_study(study).texts)
    for cell in cells:
        draw = random.Random(cell.name)
        law = 0.05 * (parameters_of(WIDTHS[cell.size.name]) / 1e5) ** -0.5 + draw.gauss(0, 0.0005)
        losses = [4.0 + cell.seed + (law if cell.label == "nvfp4" else 0.0)] * 8
        settings = cell.settings(facts)
        cell.write("cell.json", settings)
        made = {"settings": settings, "losses": losses, "tokens": 9, "made_with": made_with(ROOT)}
        cell.write("result.json", {**RESULT, **made})
    return study


def test_parameters_are_counted_once(study, tmp_path):
    write_config(tmp_path)
    raw = json.loads(study.read_text())
    raw["sizes"] = [{"name": "wide", "set": {"megalowbit.model.overrides": {"n_embd": 64}}}, {"name": "tiny"}]
    study.write_text(json.dumps(raw))
    cells = cells_of(read_study(study), tmp_path / "out", ROOT / "launch" / "pretrain.py")
    assert count_parameters(cells) == {"wide": parameters_of(64), "tiny": parameters_of(32)}


def test_sizes_that_have_read_different_numbers_of_tokens_have_no_law(three_sizes, tmp_path, capsys):
    out = tmp_path / "out"
    for path in (out / "cells").glob("small,*/result.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokens": 4}))
    done = call_main("tools/study.py", three_sizes, "--out", out, "--report", capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "study.json").read_text())["sizes"] == []
    assert (
        "No power law at 8 steps, text parts: sizes have read 4, 9 tokens." in (out / "study.md").read_text()
    )


def test_a_model_under_stress_is_no_size(three_sizes, tmp_path, capsys):
    """It has as many parameters as the unstressed one, and other gaps."""
    out = tmp_path / "out"
    done = call_main("tools/study.py", three_sizes, "--out", out, "--report", capsys=capsys)
    expected = json.loads((out / "study.json").read_text())["sizes"]
    raw = json.loads(three_sizes.read_text())
    raw["sizes"].append({"name": "stressed", "stress_of": "small", "lr_factor": 4.0})
    raw["instability"] = {"window": 4}
    three_sizes.write_text(json.dumps(raw))
    study = read_study(three_sizes)
    cells = cells_of(study, out, ROOT / "launch" / "pretrain.py")
    (facts,) = (write_text(t, cells[0].text_folder, heldout_bytes=3000) for t in study.texts)
    for cell in cells:
        if cell.size.name == "stressed":
            settings = cell.settings(facts)
            cell.write("cell.json", settings)
            losses = [4.0 + cell.seed + (0.5 if cell.label == "nvfp4" else 0.0)] * 8
            made = {"settings": settings, "losses": losses, "tokens": 9, "made_with": made_with(ROOT)}
            cell.write("result.json", {**RESULT, **made})
    done = call_main("tools/study.py", three_sizes, "--out", out, "--report", capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "study.json").read_text())["sizes"] == expected


def test_sizes_with_other_texts_have_no_law_over_all_texts_and_the_report_says_so(
    three_sizes, tmp_path, capsys
):
    out = tmp_path / "out"
    raw = json.loads(three_sizes.read_text())
    raw["texts"] += [{**raw["texts"][0], "name": name} for name in ("second", "third")]
    three_sizes.write_text(json.dumps(raw))
    study = read_study(three_sizes)
    texts = {"small": "second", "middle": "third", "large": "second"}
    for cell in cells_of(study, out, ROOT / "launch" / "pretrain.py"):
        if cell.text == texts[cell.size.name]:
            text = next(each for each in study.texts if each.name == cell.text)
            settings = cell.settings(write_text(text, cell.text_folder, heldout_bytes=3000))
            cell.write("cell.json", settings)
            made = {"settings": settings, "losses": [4.0 + cell.seed] * 8, "tokens": 9}
            cell.write("result.json", {**RESULT, **made, "made_with": made_with(ROOT)})
    done = call_main("tools/study.py", three_sizes, "--out", out, "--report", capsys=capsys)
    assert done.returncode == 0, done.stderr
    said = (
        "No power law over all texts at 8 steps: sizes have different ones "
        "(small: parts and second; middle: parts and third; large: parts and second)."
    )
    assert said in done.stdout
    assert said in (out / "study.html").read_text()
    data = json.loads((out / "study.json").read_text())
    assert [each["text"] for each in data["sizes"]] == ["parts"]
    assert data["missing"] == [said]


def test_a_report_of_three_sizes_has_the_law_and_with_two_none(three_sizes, tmp_path, capsys):
    out = tmp_path / "out"
    done = call_main("tools/study.py", three_sizes, "--out", out, "--report", capsys=capsys)
    assert done.returncode == 0, done.stderr
    (trend,) = json.loads((out / "study.json").read_text())["sizes"]
    law = trend["laws"]["nvfp4"]
    assert law["low"] < -0.5 < law["high"]
    assert law["exponent"] == pytest.approx(-0.5, abs=0.1)
    assert [int(size) for size in law["estimates"]] == [parameters_of(width) for width in WIDTHS.values()]
    page = (out / "study.html").read_text()
    for text in (page, done.stdout):
        assert "Gap over sizes, 8 steps, text parts" in text
        assert "falls with size" in text
    assert "million parameters</i>" in page
    for path in out.glob("cells/large,*"):
        path.rename(tmp_path / path.name)
    (out / "study.json").unlink()
    done = call_main("tools/study.py", three_sizes, "--out", out, "--report", capsys=capsys)
    assert json.loads((out / "study.json").read_text())["sizes"] == []
    assert "over sizes" not in done.stdout
