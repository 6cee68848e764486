"""Run folders: their names, states and attempts."""

import json
from pathlib import Path

import pytest
from made_runs import add_attempt, write_run

from megalowbit.findings import base
from megalowbit.findings.run_files import read_run
from megalowbit.findings.verdict import diagnosis_of
from megalowbit.records.attempts import read_attempts
from megalowbit.records.run import labels, read_runs


def test_attempts_of_all_ranks_are_by_time_and_torn_lines_are_left_out(tmp_path):
    add_attempt(tmp_path, {"time": 1, "step": 0, "host": "a"})
    add_attempt(tmp_path, {"time": 2.5, "event": "ended", "step": 6})
    add_attempt(tmp_path, {"time": 3, "step": 1e400, "host": "b", "processes": 10**400})
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"event": "beg')
    (tmp_path / "attempts-rank3.jsonl").write_text(
        '{"event": "ended", "time": 2, "rank": 3}\n{"event": "of a later version"}\n'
    )
    found = read_attempts(tmp_path, notes := [])
    assert [(each["time"], each["event"], each["step"]) for each in found] == [
        (1, "begun", 0), (2, "ended", None), (2.5, "ended", 6), (3, "begun", None),
    ]  # fmt: skip
    assert (found[1]["file"], found[3]["processes"]) == ("attempts-rank3.jsonl", None)
    assert notes == ["attempts.jsonl ends in the middle of line 4, which is left out"]
    assert read_attempts(tmp_path / "nowhere", notes) == []


def test_runs_are_named_by_as_few_parts_of_their_paths_as_tell_them_apart():
    assert labels([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert labels([Path("/one/run"), Path("/two/run")]) == ["one/run", "two/run"]


@pytest.mark.parametrize(
    ("done", "planned", "recorded", "finished"),
    [
        ({"step": 60}, 60, 60, 60),
        ({"step": 40}, 100, 60, None),  # continued with more steps
        ({"step": 40}, 100, 40, None),  # and stopped before the first of them
        ({"step": 40}, 40, 60, None),
        ({"step": 60}, 60, 30, 60),  # lines are lost
        ({"step": 60}, 40, 60, 60),
        ({"step": "x"}, 60, 60, 60),
        ({"step": "x"}, 100, 60, 100),
        (None, 60, 60, None),
    ],
)
def test_report_and_diagnose_agree_whether_a_run_has_finished(tmp_path, done, planned, recorded, finished):
    folder = write_run(tmp_path / "run", recorded, changes={"megalowbit.run.steps": planned}, is_done=False)
    if done is not None:
        (folder / "DONE").write_text(json.dumps(done))
    (run,) = read_runs([folder])
    diagnosed = read_run(folder)
    assert run.finished == (diagnosed.finish.step if diagnosed.finish.is_final else None) == finished
    assert run.state.startswith(f"not finished: step {recorded}" if finished is None else "finished after")
    if finished is None and recorded < planned:
        assert diagnosis_of(diagnosed).first.name == base.UNFINISHED


def test_the_state_of_a_run(tmp_path):
    write_run(tmp_path / "done", 20)
    write_run(tmp_path / "going", 20, changes={"megalowbit.run.steps": 50}, is_done=False)
    (write_run(tmp_path / "trained", 20) / "DONE").unlink()
    done, going, trained = read_runs([tmp_path / "done", tmp_path / "going", tmp_path / "trained"])
    assert trained.state == "trained for all 20 steps"
    assert trained.finished is None
    assert done.state == "finished after 20 steps"
    assert going.state.startswith("not finished: step 20 of 50, last record 0 s")
    assert going.tokens_per_step == 512
    assert done.setting("optimizer.params.lr") == 0.003
    assert done.setting("optimizer.params.lr.no", "nothing") == "nothing"
