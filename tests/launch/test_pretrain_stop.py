"""Runs asked to stop, under real launchers; without a launcher: test_stopped_ranks.py."""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from forked_ranks import run_ranks

from launchers import (
    BIN,
    SCRIPT,
    environment,
    free_port,
    kill,
    metrics,
    start,
    wait_for_step,
    write_config,
)

pytestmark = pytest.mark.slow
SECONDS = 300
START = "start     importing torch and DeepSpeed\n"


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
    assert f"stopped after step {step} on request" in output
    saved = folder / "run" / "checkpoints" / f"step-{step:08d}"
    assert (saved / "manifest.json").exists()
    assert not (folder / "run" / "DONE").exists()


def test_sigterm_to_the_launcher_also_saves_and_the_run_resumes_later(signalled, folder):
    shutil.copytree(folder / "run", folder / "resumed")
    stopped = metrics(folder / "resumed")[-1]["step"]
    arguments = ["--ds-config", "tiny.json", "--run-dir", "resumed", "--resume", "auto"]
    process = start("deepspeed", *arguments, cwd=folder, processes=2)
    wait_for_step(folder / "resumed", stopped + 2, process)
    # `deepspeed` itself passes nothing on to the process that starts the ranks
    [child] = psutil.Process(process.pid).children()
    child.send_signal(signal.SIGTERM)
    _, output = ended(process)
    step = metrics(folder / "resumed")[-1]["step"]
    assert f"stopped after step {step} on request" in output
    assert (folder / "resumed" / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
    more = ["--set", f"megalowbit.run.steps={step + 1}"]
    done = run_ranks(*arguments, *more, cwd=folder, processes=2)
    assert done.code == 0, done.output
    assert [row["step"] for row in metrics(folder / "resumed")] == list(range(1, step + 2))
    assert json.loads((folder / "resumed" / "DONE").read_text()) == {"step": step + 1}


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_ends_a_benchmark_with_one_line_and_leaves_no_empty_folder(tmp_path, number):
    config = write_config(tmp_path)
    arguments = ["--ds-config", config, "--benchmark", "100000", "--run-dir", "out"]
    process = start("python", *arguments, cwd=tmp_path)
    for line in process.stdout:
        if line.startswith("the warm-up took "):
            break
    assert (tmp_path / "out").is_dir()
    process.send_signal(number)
    code, output = ended(process)
    assert code == 128 + number, output
    line = f"ended by {number.name} before the end of the benchmark; no figures are written"
    assert output.splitlines()[-1] == line
    assert not (tmp_path / "out").exists()


def test_sigterm_ends_a_dry_run_with_one_line(tmp_path):
    process = start("python", "--ds-config", write_config(tmp_path), "--dry-run", cwd=tmp_path)
    wait_for_library(process, "torch")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, f"{START}ended by SIGTERM before the end of the dry run\n")


@pytest.mark.parametrize(
    ("flag", "before"), [("--dry-run", "the end of the dry run"), ("--prepare-data", "the data were ready")]
)
def test_an_interrupt_ends_what_trains_nothing_with_one_line(tmp_path, flag, before):
    process = start("python", "--ds-config", write_config(tmp_path), flag, cwd=tmp_path)
    wait_for_library(process, "libtorch_cpu")
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, f"{START}interrupted before {before}\n")


def wait_for_port(port, process):
    """Until somebody listens there: the main rank's store, where it waits for the others."""
    end = time.monotonic() + SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_interrupt_ends_a_run_that_waits_for_other_ranks(tmp_path):
    write_config(tmp_path)
    port = free_port()
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = start("python", "--ds-config", "tiny.json", cwd=tmp_path, MASTER_PORT=str(port), **ranks)
    wait_for_port(port, process)
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, f"{START}interrupted before the first step\n")


def test_an_interrupt_ends_the_deepspeed_launcher_whose_other_node_never_comes(tmp_path):
    write_config(tmp_path)
    port = free_port()
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=1\n")
    command = [
        str(BIN / "deepspeed"), "--hostfile=hosts", "--no_ssh", "--node_rank=0", "--master_addr=127.0.0.1",
        f"--master_port={port}", SCRIPT, "--ds-config", "tiny.json",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path / "cache") | {"DS_ACCELERATOR": "cpu"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    wait_for_port(port, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    code, output = ended(process)
    assert code != 0
    assert output.count("interrupted before the first step\n") == 1
    assert "ended by SIGTERM" not in output


@pytest.fixture
def orphans():
    """Ranks whose launcher has ended become children of this process, whose exit codes can be read."""
    libc, subreaper = ctypes.CDLL(None), 36
    assert libc.prctl(subreaper, 1, 0, 0, 0) == 0
    yield
    libc.prctl(subreaper, 0, 0, 0, 0)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "RANK" in process.environ():
                process.kill()


@pytest.mark.parametrize(("launcher", "seconds"), [("torchrun", 0), ("torchrun", 8), ("deepspeed", 0)])
def test_ranks_whose_launcher_is_killed_save_the_same_step(tmp_path, orphans, launcher, seconds):
    """`seconds`: what the step takes. The store ends with torchrun, which each rank notices in 2.5 s."""
    write_config(tmp_path, block={"run": {"steps": 5000}})
    arguments = ["--ds-config", "tiny.json", "--run-dir", "run", "--resume", "auto"]
    process = start(launcher, *arguments, cwd=tmp_path, processes=2)
    wait_for_step(tmp_path / "run", 2, process)
    ranks = ranks_of(process)
    ranks[1].suspend()
    process.kill()
    time.sleep(seconds)
    ranks[1].resume()
    codes = {rank: each.wait(SECONDS) for rank, each in ranks.items()}
    kill(process)
    output = process.stdout.read()
    step = metrics(tmp_path / "run")[-1]["step"]
    line = f"error: the launcher has ended before its ranks: saved after step {step}, continue with --resume"
    assert output.count(line) == 1, output
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
    assert not (tmp_path / "run" / "DONE").exists()
    assert step < 5000
    last = (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["fault"] == "launcher"
    assert codes[0] == 75 or launcher == "deepspeed"  # whose inner launcher takes the code for itself
    done = run_ranks(*arguments, "--set", f"megalowbit.run.steps={step + 1}", cwd=tmp_path, processes=2)
    assert done.code == 0, done.output
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, step + 2))


def test_a_rank_that_waits_without_its_launcher_ends_in_time(tmp_path, orphans):
    write_config(tmp_path, block={"run": {"steps": 5000}, "watchdog": {"termination_seconds": 5}})
    process = start("torchrun", "--ds-config", "tiny.json", "--run-dir", "run", cwd=tmp_path, processes=2)
    wait_for_step(tmp_path / "run", 2, process)
    ranks = ranks_of(process)
    ranks[1].suspend()
    process.kill()
    code = ranks[0].wait(100)  # gloo waits for 600 s
    ranks[1].kill()
    kill(process)
    output = process.stdout.read()
    assert code == 75, output
    assert re.search(
        r"error: the launcher's store \(at \S+\) ended \d+ s ago: .*; rank 0 .* waited \d+ s ", output
    )


def test_ranks_continue_without_their_launcher_if_configured(tmp_path, orphans):
    write_config(tmp_path, block={"run": {"steps": 100}, "watchdog": {"stop_with_launcher": False}})
    process = start("torchrun", "--ds-config", "tiny.json", "--run-dir", "run", cwd=tmp_path, processes=2)
    wait_for_step(tmp_path / "run", 2, process)
    ranks = ranks_of(process)
    process.kill()
    codes = {rank: each.wait(SECONDS) for rank, each in ranks.items()}
    kill(process)
    assert codes == {0: 0, 1: 0}, process.stdout.read()
    assert json.loads((tmp_path / "run" / "DONE").read_text()) == {"step": 100}
