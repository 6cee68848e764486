"""Runs asked to stop, under real launchers: all ranks save after the same step; files say how it ended."""

import json
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from forked_ranks import run_ranks

from launchers import free_port, kill, metrics, run, start, wait_for_step, write_config

SECONDS = 120


def ranks_of(launcher):
    """Processes of `launcher` that train, by rank."""
    found = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        environment = process.environ()
        if "RANK" in environment and "pretrain.py" in " ".join(process.cmdline()):
            found[int(environment["RANK"])] = process
    return found


def ended(process):
    output, _ = process.communicate(timeout=SECONDS)
    kill(process)
    return process.returncode, output


def wait_for_library(process, name):
    """Until a library is loaded, long after signals were blocked."""
    end = time.monotonic() + SECONDS
    while name not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    write_config(folder, block={"run": {"steps": 400}})
    return folder


@pytest.fixture(scope="module")
def signalled(folder):
    """torchrun, and SIGUSR1 for rank 1 alone."""
    arguments = ["--ds-config", "tiny.json", "--run-dir", "run"]
    process = start("torchrun", *arguments, cwd=folder, processes=2)
    wait_for_step(folder / "run", 2, process)
    ranks_of(process)[1].send_signal(signal.SIGUSR1)
    return ended(process)


def test_a_signal_to_one_rank_saves_the_same_step_on_all_and_ends_with_0(signalled, folder):
    code, output = signalled
    step = metrics(folder / "run")[-1]["step"]
    assert code == 0, output
    assert 2 <= step < 400
    assert f"stopped after step {step} as asked" in output
    saved = folder / "run" / "checkpoints" / f"step-{step:08d}"
    assert (saved / "manifest.json").exists()
    assert not (folder / "run" / "DONE").exists()


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_too_and_the_rest_is_done_later(signalled, folder):
    stopped = metrics(folder / "run")[-1]["step"]
    arguments = ["--ds-config", "tiny.json", "--run-dir", "run", "--resume", "auto"]
    process = start("deepspeed", *arguments, cwd=folder, processes=2)
    wait_for_step(folder / "run", stopped + 2, process)
    # `deepspeed` itself passes nothing on to the process that starts the ranks
    [child] = psutil.Process(process.pid).children()
    child.send_signal(signal.SIGTERM)
    _, output = ended(process)
    step = metrics(folder / "run")[-1]["step"]
    assert f"stopped after step {step} as asked" in output
    assert (folder / "run" / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
    more = ["--set", f"megalowbit.run.steps={step + 1}"]
    done = run("torchrun", *arguments, *more, cwd=folder, processes=2, seconds=SECONDS)
    assert done.code == 0, done.output
    assert [row["step"] for row in metrics(folder / "run")] == list(range(1, step + 2))
    assert json.loads((folder / "run" / "DONE").read_text()) == {"step": step + 1}


def test_a_mistake_is_also_written_where_whoever_starts_jobs_again_looks(tmp_path):
    write_config(tmp_path)
    refusal = tmp_path / "refusal"
    arguments = ["--ds-config", "tiny.json", "--set", "megalowbit.recipe=nvfp5"]
    done = run_ranks(*arguments, cwd=tmp_path, MEGALOWBIT_REFUSAL=str(refusal))
    assert done.code == 2
    assert f"error: {refusal.read_text()}" in done.output
    assert "nvfp5" in refusal.read_text()


def test_what_may_be_gone_at_the_next_try_is_no_refusal(tmp_path):
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


def test_sigterm_ends_a_run_that_has_not_begun_at_once(tmp_path):
    write_config(tmp_path)
    # the other rank never comes
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = start("python", "--ds-config", "tiny.json", cwd=tmp_path, MASTER_PORT=str(free_port()), **ranks)
    wait_for_library(process, "torch")
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == 143, output
    assert output.splitlines()[-1] == "ended by SIGTERM before the first step"
