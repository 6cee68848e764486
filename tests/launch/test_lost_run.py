"""On two ranks: a run that has lost its checkpoints is rejected with one line, and restarts on request."""

import fcntl
import shutil

import pytest
from ended_runs import contents, rows
from forked_ranks import Ranks, run_ranks

from launchers import write_config

pytestmark = pytest.mark.slow  # in one process: tests/pretrain/run_folder
BLOCK = {
    "run": {"steps": 3},
    "checkpoint": {"every": 2, "export_hf": False},
    "telemetry": {"log_every": 1, "tensorboard": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost")
    write_config(folder, block=BLOCK)
    done = run_ranks("--ds-config", "tiny.json", "--run-dir", "run", cwd=folder, processes=2)
    assert done.code == 0, done.output
    shutil.rmtree(folder / "run" / "checkpoints")
    return folder


def test_two_ranks_reject_with_one_line_and_are_not_retried(folder):
    before, refusal = contents(folder / "run"), folder / "refusal"
    with Ranks(
        folder,
        "--ds-config",
        "tiny.json",
        "--run-dir",
        "run",
        "--resume",
        "auto",
        MEGALOWBIT_REFUSAL=str(refusal),
    ) as ranks:
        assert ranks.wait(), ranks.output()
        assert ranks.codes == [2, 2]
        (line,) = ranks.errors
    assert "checkpoints does not exist: put them back to continue, or start over with" in line
    assert line == f"error: {refusal.read_text().rstrip()}"
    assert contents(folder / "run") == before


def test_restart_is_rejected_for_another_job_and_then_restarts_both_ranks(folder):
    before = contents(folder / "run")
    command = ("--ds-config", "tiny.json", "--run-dir", "run", "--restart")
    with (folder / "run" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run_ranks(*command, cwd=folder, processes=2)
    assert "is in use by another job" in done.errors[0]
    assert contents(folder / "run") == before
    both = run_ranks(*command, "--resume", "auto", cwd=folder)
    assert (both.code, both.errors) == (
        2, ["error: --restart and --resume auto cannot be combined: leave one of them out"]
    )  # fmt: skip
    (folder / "link").symlink_to(folder / "run")
    done = run_ranks("--ds-config", "tiny.json", "--run-dir", "link", "--restart", cwd=folder, processes=2)
    assert done.code == 0, done.output
    assert contents(folder / "run" / "before-restart-1") == before
    assert rows(folder / "run") == [1, 2, 3]
