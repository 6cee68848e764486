"""Runs asked to stop, or unable to start: all ranks save the same step, and files say how the run ended.

The ranks are forked and have no launcher; with real launchers: test_pretrain_stop.py.
"""

import gzip
import json
import shutil
import signal
import socket
from pathlib import Path

import pytest
from forked_ranks import Ranks, run_ranks

from launchers import metrics, write_config


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run on two ranks of which the second alone got SIGUSR1, and what the ranks did."""
    folder = tmp_path_factory.mktemp("stopped")
    write_config(folder, block={"run": {"steps": 5000}, "checkpoint": {"export_hf": False}})
    with Ranks(folder, "--ds-config", "tiny.json", "--run-dir", "run") as ranks:
        ranks.reach(folder / "run", 2)
        ranks.send(signal.SIGUSR1, [1])
        assert ranks.wait(), ranks.output()
    return folder, ranks


def test_a_signal_to_one_rank_saves_the_same_step_on_all_ranks_and_exits_with_0(stopped):
    folder, ranks = stopped
    assert ranks.codes == [0, 0], ranks.output()
    step = metrics(folder / "run")[-1]["step"]
    assert 2 <= step < 5000
    assert f"stopped after step {step} on request" in ranks.output()
    assert (folder / "run" / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
    assert not (folder / "run" / "DONE").exists()


@pytest.mark.slow
def test_a_stopped_run_resumes_after_that_step_and_is_marked_as_finished_at_its_end(stopped):
    folder, _ = stopped
    shutil.copytree(folder / "run", folder / "resumed")
    step = metrics(folder / "resumed")[-1]["step"]
    arguments = ["--ds-config", "tiny.json", "--run-dir", "resumed", "--resume", "auto"]
    done = run_ranks(*arguments, "--set", f"megalowbit.run.steps={step + 1}", cwd=folder, processes=2)
    assert done.code == 0, done.output
    assert [row["step"] for row in metrics(folder / "resumed")] == list(range(1, step + 2))
    assert json.loads((folder / "resumed" / "DONE").read_text()) == {"step": step + 1}


@pytest.mark.slow
def test_a_run_that_is_stopped_while_it_is_profiled_ends_well_and_keeps_the_trace(tmp_path):
    """Not forked: torch crashes when an interpreter frees its modules while it profiles."""
    write_config(tmp_path, block={"run": {"steps": 5000}, "profile": {"first_step": 2, "steps": 4000}})
    arguments = ["--ds-config", "tiny.json", "--run-dir", "run"]
    with Ranks(tmp_path, *arguments, world_size=1, is_forked=False) as ranks:
        ranks.reach(tmp_path / "run", 3)
        ranks.send(signal.SIGUSR1, [0])
        assert ranks.wait(), ranks.output()
    assert ranks.codes == [0], ranks.output()
    step = metrics(tmp_path / "run")[-1]["step"]
    trace = Path("run", "profile", f"steps-2-{step}-rank-0.trace.json.gz")
    assert f"profile of steps 2 to {step}: " in ranks.output()
    with gzip.open(tmp_path / trace) as file:
        assert json.load(file)["traceEvents"]


def test_a_user_error_is_also_written_to_the_refusal_file(tmp_path):
    write_config(tmp_path)
    refusal = tmp_path / "refusal"
    arguments = ["--ds-config", "tiny.json", "--set", "megalowbit.recipe=nvfp5"]
    done = run_ranks(*arguments, cwd=tmp_path, MEGALOWBIT_REFUSAL=str(refusal))
    assert done.code == 2
    assert f"error: {refusal.read_text()}" in done.output
    assert "nvfp5" in refusal.read_text()


def test_a_transient_error_writes_no_refusal_file(tmp_path):
    write_config(tmp_path)
    refusal = tmp_path / "refusal"
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as other_job:
        other_job.bind(("", 0))
        other_job.listen()
        port = other_job.getsockname()[1]
        more = {**ranks, "MASTER_PORT": str(port), "MEGALOWBIT_REFUSAL": str(refusal)}
        done = run_ranks("--ds-config", "tiny.json", cwd=tmp_path, **more)
    assert done.code == 75
    [line] = done.errors
    assert f"no connection to the main process at 127.0.0.1:{port}" in line
    assert not refusal.exists()
