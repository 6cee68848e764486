"""Detection of the launcher and of its end, with real parent processes."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megalowbit.pretrain.stopping.launcher import LauncherWatch, is_launched

ROOT = Path(__file__).parents[3]
RANK = """
import os, signal, sys
from megalowbit.pretrain.stopping.launcher import LauncherWatch
from megalowbit.pretrain.stopping.signals import block_stop_signals
block_stop_signals()
with LauncherWatch() as launcher:
    print(os.getpid(), launcher.has_ended, flush=True)
    sys.stdin.readline()
    print(signal.sigwait({signal.SIGUSR1}).name, launcher.has_ended, flush=True)
"""
LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()
"""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_JOB_ID": "1"}, False),
        ({"MEGALOWBIT_TRY": "7-0"}, True),
        ({"TORCHELASTIC_RUN_ID": "none"}, True),
        ({"CROSS_RANK": "0", "LOCAL_SIZE": "2"}, True),
    ],
)
def test_launchers_and_job_scripts_are_known_by_what_they_export(environ, expected):
    assert is_launched(environ) is expected


def test_a_running_launcher_has_not_ended():
    with LauncherWatch() as launcher:
        assert not launcher.has_ended


@pytest.mark.parametrize("kind", ["parent", "deepspeed", "another parent's parent"])
def test_the_end_of_a_launcher_is_noticed_and_that_of_another_parent_is_not(tmp_path, kind):
    """Three processes: a program, a launcher, and the rank that watches."""
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    for name in ("deepspeed", "shell"):
        (tmp_path / name).write_text(LAUNCHER)
    package = tmp_path / "deepspeed.launcher.launch"  # what `python -m` leaves in the arguments of a process
    package.write_text(LAUNCHER)
    module = package.name if kind == "deepspeed" else str(package)
    above = tmp_path / ("deepspeed" if kind == "deepspeed" else "shell")
    command = [sys.executable, str(above), module, str(rank)]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    number, has_ended = process.stdout.readline().split()
    assert has_ended == "False"
    launcher = psutil.Process(int(number)).parent()
    (launcher if kind == "parent" else process).kill()
    if kind == "another parent's parent":
        process.wait()
        rank_process = psutil.Process(int(number))
        assert rank_process.ppid() == launcher.pid
        rank_process.send_signal(signal.SIGUSR1)
    process.stdin.write("\n")
    process.stdin.close()
    expected = "False" if kind == "another parent's parent" else "True"
    assert process.stdout.readline() == f"SIGUSR1 {expected}\n"
    process.kill()
    process.wait()
