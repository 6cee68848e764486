"""Runs asked to stop, under real launchers: all ranks save after the same step; files say how it ended."""

import json
import signal

import psutil
import pytest

from launchers import kill, metrics, run, start, wait_for_step, write_config

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
    done = run("python", *arguments, cwd=tmp_path, MEGALOWBIT_REFUSAL=str(refusal))
    assert done.code == 2
    assert f"error: {refusal.read_text()}" in done.output
    assert "nvfp5" in refusal.read_text()


def test_what_may_be_gone_at_the_next_try_is_no_refusal(tmp_path):
    write_config(tmp_path)
    refusal = tmp_path / "refusal"
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "not-a-port"}
    done = run("python", "--ds-config", "tiny.json", cwd=tmp_path, MEGALOWBIT_REFUSAL=str(refusal),
               **ranks, **address)  # fmt: skip
    assert done.code != 0
    assert not refusal.exists()
