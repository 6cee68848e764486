"""The page: what it contains, how large it is, what it refuses, and that no name becomes markup."""

import errno
import html.parser
import json
import os
import re
import shutil
import time

import pytest
from made_runs import add_attempt, write_checks, write_layers, write_run

from megalowbit.errors import UserError
from megalowbit.report import page as page_module
from megalowbit.report.page import write_report

EVIL = '"><img src=x onerror=alert(1)><script>alert(1)</script>'


class Reader(html.parser.HTMLParser):
    """Collects tags, attributes and texts, and checks that tags close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def skipping(step, record):
    """Validation, two skipped steps, one loss that is not finite, speculation."""
    record["skipped_steps"] = sum(step >= each for each in (5, 9))
    if step in (5, 9):
        record |= {"grad_norm": None, "skipped/tensor": "h.1.mlp.bias", "skipped/rank": 0}
    if step == 20:
        record |= {"loss": None, "nonfinite": {"loss": "nan"}}
    if step % 50 == 0:
        record |= {"validation/loss": 2.5, "validation/bf16_loss": 2.4, "validation/bits_per_byte": 1.1}
    if step % 10 == 1:
        record |= {"speculation/share_int8": 0.5, "speculation/share_bf16": 0.5}
    return record | {"loss/python": 2.0, "oscillation/ratio": 3.0}


@pytest.fixture
def full_run(tmp_path):
    """A run with everything that a page shows."""
    folder = write_run(tmp_path / "full", 200, rows=skipping)
    write_layers(folder, steps=200, layers=8)
    write_checks(folder, steps=200)
    for step in (0, 100):
        add_attempt(folder, {"step": step, "host": f"node{step}", "device": "H100", "layout": "data 8"})
    return folder


def page_of(*folders, out):
    return Reader(write_report(list(folders), out).read_text(encoding="utf-8"))


def test_a_page_of_one_run_has_every_section_and_stands_alone(full_run):
    path = write_report([full_run])
    assert path == full_run / "report.html"
    page = Reader(path.read_text(encoding="utf-8"))
    text = " ".join(page.texts)
    for title in (
        "Training loss", "Validation loss", "Loss by source", "Learning rate", "Gradient norm", "Loss scale",
        "Where gradients overflowed", "Tokens per second", "MFU", "Memory of the main process",
        "Precision shares", "the overflow of a format", "Underflow by layer and step",
        "Signal-to-noise ratio", "Attempts",
        "Environment", "oscillation/ratio", "Configuration of full",
    ):  # fmt: skip
        assert title in text, title
    assert "The loss was not finite in 1 step, first in step 20." in text
    assert "Skipped because gradients overflowed: 2 steps (1 %), the last one step 9." in text
    assert "What differs" not in text
    sources = [value for name, value in page.attributes if name in ("src", "href")]
    assert all(each.startswith(("data:image/png;base64,", "#")) for each in sources)
    assert len([each for each in sources if each.startswith("data:")]) == 9 + 3 + 3
    assert page.tags.count("script") == 1


def test_a_page_of_several_runs_has_gaps_noise_and_differences(full_run, tmp_path):
    repeat = write_run(tmp_path / "repeat", 200, seed=1, changes={"megalowbit.run.seed": 2})
    short = write_run(tmp_path / "short", 60, seed=2, changes={"megalowbit.recipe": "mxfp4"}, is_done=False)
    other = write_run(tmp_path / "other", 200, changes={"megalowbit.data.corpus": "novels"})
    page = page_of(full_run, repeat, short, other, out=tmp_path / "compared.html")
    text = " ".join(page.texts)
    assert "Noise floor: " in text
    assert "in their seeds only (repeat)." in text
    assert "other and full have no gap: they differ in text" in text
    assert "short: The runs have 60 and 200 steps; the gap ends at step 60." in text
    assert "not finished: step 60 of 60" in text
    table = text[text.index("What differs", text.index("Configuration")) :]
    for key in ("megalowbit.data.corpus", "megalowbit.run.seed", "megalowbit.recipe"):
        assert key in table
    assert "megalowbit.precision" not in table[: table.index("Configuration of")]


def test_a_run_that_starts_from_another_names_it_and_is_named_by_it(tmp_path):
    first = write_run(tmp_path / "first", 50)
    start = str(first / "checkpoints" / "step-00000050")
    second = write_run(tmp_path / "second", 50, changes={"megalowbit.model.checkpoint": start})
    text = " ".join(page_of(first, second, out=tmp_path / "out.html").texts)
    assert f"second: It starts from the weights in {start}, which are those of first." in text
    assert "first: second starts from its weights." in text
    alone = " ".join(page_of(second, out=tmp_path / "out.html").texts)
    assert f"It starts from the weights in {start}." in alone


def test_other_numbers_of_tokens_a_step_are_drawn_over_tokens_without_a_gap(tmp_path):
    first, second = write_run(tmp_path / "a", 50), write_run(tmp_path / "b", 50, tokens=1024)
    page = page_of(first, second, out=tmp_path / "out.html")
    assert {value for name, value in page.attributes if name == "data-name"} == {"tokens"}
    text = " ".join(page.texts)
    assert "Gap of the training loss" not in text
    assert "b and a have no gap: a step has 1,024 and 512 tokens" in text


def test_nothing_that_a_run_contains_becomes_markup(tmp_path):
    def evil(step, record):
        return record | {
            f"loss/{EVIL}": 1.0, f"speculation/share_{EVIL}": 1.0, f"{EVIL}": 1.0,
            f"milliseconds/{EVIL}": 1.0,
            "skipped_steps": step, "skipped/tensor": EVIL,
        }  # fmt: skip

    changes = {"megalowbit.recipe": EVIL, "megalowbit.data.corpus": EVIL, EVIL: EVIL}
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>", 30, rows=evil, changes=changes)
    other = write_run(tmp_path / "b&amp;", 30)
    write_layers(run, steps=30, every=10, layers=1)
    table = run / "overflow_layers.jsonl"
    table.write_text(table.read_text().replace("transformer.h.0", json.dumps(EVIL)[1:-1]))
    write_checks(run, steps=30, candidates=(json.dumps(EVIL)[1:-1].replace("\\", ""), "bf16"))
    add_attempt(run, {"step": EVIL, "host": EVIL, "formats": {EVIL: EVIL}, "time": EVIL})
    add_attempt(run, {"step": 1, "host": EVIL, "formats": [EVIL], "low_bit_layers": EVIL})
    for folders in ([run], [run, other], [other, run]):
        page = page_of(*folders, out=tmp_path / "out.html")
        assert page.tags.count("script") == 1
        assert {value[:11] for name, value in page.attributes if name == "src"} <= {"data:image/"}
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert EVIL in " ".join(page.texts)


def test_records_of_odd_shapes_make_a_page(tmp_path):
    def odd(step, record):
        if step % 7 == 0:
            return None  # no line
        return {
            "step": step,
            "loss": None if step < 30 else 1e30,
            "lr": 0,
            "grad_norm": None,
            "tokens": None,
        }

    run = write_run(tmp_path / "odd", 40, rows=odd, is_done=False)
    one = write_run(tmp_path / "one", 1)
    (one / "summary.json").write_text("[]")
    (one / "config.json").write_text(json.dumps({"megalowbit": {"recipe": None, "run": 7, "data": "x"}}))
    for folders in ([run], [one], [run, one], [one, run]):
        assert "Training loss" in " ".join(page_of(*folders, out=tmp_path / "out.html").texts)
    never = write_run(tmp_path / "never", 20, losses=[float("nan")] * 20)
    text = " ".join(page_of(never, out=tmp_path / "out.html").texts)
    assert "The loss was not finite in 20 steps" in text


def refusals(tmp_path):
    """Arguments of `write_report` and what the one message says."""
    run = write_run(tmp_path / "run", 20)
    empty, no_config = tmp_path / "empty", tmp_path / "no-config"
    for each in (empty, no_config):
        shutil.copytree(run, each)
    (empty / "metrics.jsonl").write_text("")
    (no_config / "config.json").unlink()
    (foreign := tmp_path / "foreign").mkdir()
    (foreign / "config.json").write_text('{"model_type": "gpt2"}')
    shutil.copytree(run, broken := tmp_path / "broken")
    (broken / "config.json").write_text("{")
    shutil.copytree(run, going := tmp_path / "going")
    (going / "metrics.jsonl").unlink()
    shutil.copytree(run, pipe := tmp_path / "pipe")
    (pipe / "metrics.jsonl").unlink()
    os.mkfifo(pipe / "metrics.jsonl")
    out = tmp_path / "out.html"
    return [
        ([tmp_path / "nowhere"], out, "nowhere does not exist: name a run folder"),
        ([run / "config.json"], out, "is not a folder: name a run folder"),
        ([no_config], out, r"is not a run folder \(no config.json\)"),
        ([foreign], out, "has no megalowbit block"),
        ([broken], out, "is not JSON"),
        ([empty], out, r"no step \(metrics.jsonl is empty\): wait for"),
        ([going], out, "metrics.jsonl is missing, so no step is known.*: wait for"),
        ([pipe], out, "metrics.jsonl is not a regular file"),
        ([run, run / "." / "x" / ".."], out, "is named twice"),
        ([run, empty], None, "name it with --out FILE"),
        ([run], tmp_path, "is a folder: name a file"),
        ([run], tmp_path / "missing" / "out.html", "cannot be written .*: name another file with --out"),
        ([run] * 19, out, "19 runs are too many"),
    ]


def test_mistakes_are_one_message_each_and_write_nothing(tmp_path):
    for folders, out, message in refusals(tmp_path):
        with pytest.raises(UserError, match=message) as refused:
            write_report(folders, out)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", ".lock", "pipe", "link to metrics"])
def test_only_a_page_is_replaced_by_a_page(tmp_path, name):
    run = write_run(tmp_path / "run", 20)
    (run / ".lock").touch()
    os.mkfifo(run / "pipe")
    (run / "link to metrics").symlink_to("metrics.jsonl")
    before = {each.name: each.lstat() for each in run.iterdir()}
    with pytest.raises(UserError, match=r"is no HTML page|is not a regular file"):
        write_report([run], run / name)
    assert {each.name: (each.lstat().st_ino, each.lstat().st_size) for each in run.iterdir()} == {
        key: (value.st_ino, value.st_size) for key, value in before.items()
    }


def test_a_page_replaces_an_earlier_one_and_a_link_stays_a_link(tmp_path):
    run, other = write_run(tmp_path / "run", 20), tmp_path / "other.html"
    other.write_text("<!DOCTYPE HTML><p>old</p>")
    (tmp_path / "link.html").symlink_to(other)
    assert write_report([run], tmp_path / "link.html") == tmp_path / "link.html"
    assert (tmp_path / "link.html").is_symlink()
    assert "Training loss" in other.read_text()
    write_report([run], other)


def test_a_folder_that_cannot_be_written_to_needs_another_file(full_run, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(page_module, "atomic_file", refuse)
    with pytest.raises(
        UserError, match=r"report.html cannot be written \(Permission denied\): .* with --out"
    ):
        write_report([full_run])


def test_a_page_of_a_hundred_thousand_steps_is_below_five_megabytes(tmp_path):
    def rows(step, record):
        return record | ({"loss": 9.0} if step == 77_777 else {})

    folder = write_run(tmp_path / "long", 100_000, rows=rows)
    write_layers(folder, steps=100_000, every=1000, layers=48)
    began = time.perf_counter()
    text = write_report([folder]).read_text()
    print(f"100,000 steps: {len(text) / 1e6:.2f} MB, {time.perf_counter() - began:.1f} s")
    assert len(text.encode()) < 5e6
    heights = [
        float(point.split(",")[1])
        for line in re.findall(r'<polyline class="faint c0" points="([^"]*)"', text)[:1]
        for point in line.split()
    ]
    assert sum(height < 100 for height in heights) == 1  # the spike
