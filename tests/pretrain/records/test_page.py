"""The report that a run writes: attempts, the page at the end, and that a failure is said but harmless."""

import json
import logging

import pytest

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.pretrain.records import page
from megalowbit.pretrain.run import pretrain
from megalowbit.records.attempts import read_attempts


def run(config, folder, **more):
    pretrain(config, ProcessIdentity(), run_dir=folder, is_resume=False, **more)


def starts(folder):
    return [line for line in read_attempts(folder, []) if line["event"] == "begun"]


def test_a_run_ends_with_its_page_and_each_attempt_has_a_line(resolve, tmp_path, capsys):
    folder = tmp_path / "run"
    run(resolve("megalowbit.run.steps=2"), folder)
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out
    text = (folder / "report.html").read_text()
    assert "trained for all 2 steps" in text
    first = starts(folder)
    pretrain(resolve("megalowbit.run.steps=3"), ProcessIdentity(), run_dir=folder, is_resume=True)
    again = starts(folder)
    assert again[:1] == first
    assert [each["step"] for each in again] == [0, 2]
    assert again[0]["device"] == "cpu"
    assert again[0]["low_bit_layers"] > 0
    assert 0 < again[0]["low_bit_weights"] < again[0]["parameters"]
    text = (folder / "report.html").read_text()
    assert "trained for all 3 steps" in text
    assert "Attempts" in text
    assert "<td>after step 2</td>" in text


def test_a_restart_moves_page_and_attempts_aside(resolve, tmp_path):
    folder = tmp_path / "run"
    run(resolve("megalowbit.run.steps=1"), folder)
    run(resolve("megalowbit.run.steps=1"), folder, is_restart=True)
    assert len(starts(folder)) == 1
    assert len(starts(folder / "before-restart-1")) == 1
    assert (folder / "before-restart-1" / "report.html").exists()


@pytest.mark.parametrize("name", ["write_report", "_attempt_facts"])
def test_a_run_finishes_without_its_page_and_says_so(resolve, tmp_path, monkeypatch, caplog, capsys, name):
    def fail(*_):
        raise ZeroDivisionError("a mistake in the report")

    monkeypatch.setattr(page, name, fail)
    folder = tmp_path / "run"
    with caplog.at_level(logging.WARNING):
        run(resolve("megalowbit.run.steps=1"), folder)
    assert json.loads((folder / "DONE").read_text()) == {"step": 1}
    assert "a mistake in the report" in caplog.text
    if name == "write_report":
        assert not (folder / "report.html").exists()
        assert "no report.html was written" in capsys.readouterr().out
    else:
        assert "is not known" in (folder / "report.html").read_text()
