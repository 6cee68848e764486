"""A NaN loss on one rank rolls back both together, and a kill in between changes nothing."""

import json
import signal

import pytest

from launchers import SPEEDS, write_config

pytestmark = pytest.mark.slow


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in SPEEDS} for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, launch_ranks):
    """Folder of the runs, and what rank 0 printed before and after the kill."""
    folder = tmp_path_factory.mktemp("runs")
    config = write_config(
        folder,
        block={
            "run": {"steps": 10},
            "checkpoint": {"every": 4, "keep": 2, "export_hf": False},
            "loss_guard": {"nonfinite": "rollback", "patience": 2},
            "telemetry": {"log_every": 1},
        },
        zero_optimization={"stage": 2},
    )
    killed = launch_ranks("ranks_roll_back.py", config, folder, "kill")
    codes = [process.wait(240) for process in killed.processes]
    assert codes == [-signal.SIGKILL] * 2, killed.output()
    resumed = launch_ranks("ranks_roll_back.py", config, folder, "resume")
    resumed.wait(timeout=240)
    return folder, killed.logs[0].read_text(), resumed.logs[0].read_text()


def test_both_ranks_roll_back_if_one_has_an_unstable_loss(runs):
    folder, before, _ = runs
    found = rows(folder / "whole")
    assert [row["step"] for row in found] == list(range(1, 11))
    assert all(row["loss"] is not None for row in found)
    assert [row.get("rollbacks") for row in found] == [None] * 4 + [1] * 6
    assert before.count("rolled back after step 7 to step 4") == 2  # of the whole run and of the killed one


def test_a_run_killed_after_a_rollback_repeats_the_same_steps(runs):
    folder, _, after = runs
    assert "resumed after step 4" in after
    assert after.count("rolled back after step 7 to step 4") == 1
    assert rows(folder / "killed") == rows(folder / "whole")
    summaries = [json.loads((folder / name / "summary.json").read_text()) for name in ("killed", "whole")]
    assert summaries[0]["rollbacks"] == summaries[1]["rollbacks"]
    assert len(summaries[0]["rollbacks"]) == 1
