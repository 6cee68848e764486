"""A run whose lines are gone is not called healthy."""

import fcntl
import json
import os

import pytest

from megalowbit.commands.runs.diagnose import main
from megalowbit.findings import base
from megalowbit.findings.records import findings
from megalowbit.findings.run_files import read_run


def remove(path):
    path.unlink()


def empty(path):
    path.write_text("")


def folder(path):
    path.unlink()
    path.mkdir()


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def rubbish(path):
    path.write_bytes(bytes(range(1, 256)) * 10 + b"\n")


def one_row(path):
    path.write_text(path.read_text().splitlines(keepends=True)[0])


def last_row(path):
    path.write_text(path.read_text().splitlines(keepends=True)[-1])


def torn(path):
    path.write_text(path.read_text()[:-20])


DAMAGES = (remove, empty, folder, fifo, rubbish, one_row, last_row, torn)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kept", ["DONE", "summary.json", "attempts.jsonl"])
def test_a_run_without_its_lines_is_troubled_and_the_file_is_named(records, tmp_path, capsys, damage, kept):
    run = records.write(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps({"steps": 60}))
    damage(run / "metrics.jsonl")
    for name in {"DONE", "summary.json", "attempts.jsonl"} - {kept}:
        (run / name).unlink()
    assert main([str(run), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    found = [each for each in (verdict["first"], *verdict["others"]) if each["name"] == base.RECORDS]
    assert len(found) == 1
    assert "metrics.jsonl" in found[0]["title"]
    if damage in (remove, folder, fifo, rubbish, torn):
        assert any(note.startswith("metrics.jsonl") for note in verdict["notes"])


def test_a_run_with_all_lines_and_one_that_starts_later_have_no_finding(records, tmp_path):
    assert not findings(records.read(tmp_path / "healthy"))
    records.rows, records.attempts[0]["step"] = records.rows[20:], 20
    assert not findings(records.read(tmp_path / "continues"))
    records.attempts[0]["step"] = 0
    (found,) = findings(records.read(tmp_path / "lost"))
    assert "20 trained steps of metrics.jsonl" in found.title


def test_a_stale_summary_and_a_run_that_trains_have_no_finding(records, tmp_path):
    records.is_done, records.rows = False, records.rows[:30]
    records.attempts += [{**records.attempts[0], "time": 3.0, "step": 20}]  # went back, and was killed
    run = records.write(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps({"steps": 60}))
    assert not findings(read_run(run))
    (run / "DONE").write_text('{"step": 60}')
    assert findings(read_run(run))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not findings(read_run(run))
