"""Run folders: their names, states and attempts."""

from pathlib import Path

from made_runs import add_attempt, write_run

from megalowbit.report.records.attempts import read_attempts
from megalowbit.report.records.run import labels, read_runs


def test_attempts_are_those_that_begin_and_torn_lines_are_left_out(tmp_path):
    add_attempt(tmp_path, {"step": 0, "host": "a"})
    add_attempt(tmp_path, {"event": "ended", "step": 6})
    add_attempt(tmp_path, {"step": 6, "host": "b"})
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"event": "beg')
    assert [(each["step"], each["host"]) for each in read_attempts(tmp_path)] == [(0, "a"), (6, "b")]
    assert read_attempts(tmp_path / "nowhere") == []


def test_runs_are_named_by_as_few_parts_of_their_paths_as_tell_them_apart():
    assert labels([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert labels([Path("/one/run"), Path("/two/run")]) == ["one/run", "two/run"]


def test_the_state_of_a_run(tmp_path):
    write_run(tmp_path / "done", 20)
    write_run(tmp_path / "going", 20, changes={"megalowbit.run.steps": 50}, is_done=False)
    done, going = read_runs([tmp_path / "done", tmp_path / "going"])
    assert done.state == "finished after 20 steps"
    assert going.state.startswith("not finished: step 20 of 50, last record 0 s")
    assert going.tokens_per_step == 512
    assert done.setting("optimizer.params.lr") == 0.003
    assert done.setting("optimizer.params.lr.no", "nothing") == "nothing"
