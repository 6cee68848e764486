"""Runs killed at random moments and resumed are bitwise equal to an uninterrupted run.

The short soak is of one run with nearly everything that has state, whose ranks are forked after all imports;
speculation is killed in test_pretrain_speculation.py. The long one is of all, imports included.
"""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import ROOT, built_libraries, copy_libraries, environment

SOAK = ROOT / "tests" / "launch" / "kill_soak.py"


def soak(folder, *arguments):
    """What a soak says; fails with it if a run was not alike, or ended in another way than runs may."""
    environment(folder / "cache")  # puts compiled kernels there
    command = [sys.executable, SOAK, "--folder", folder, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    copy_libraries(folder / "cache", Path(built_libraries().name))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    return done.stdout


@pytest.mark.slow
def test_a_run_killed_repeatedly_equals_an_uninterrupted_one_bitwise(tmp_path):
    seed = random.randrange(10**6)  # printed, and with every failure
    said = soak(
        tmp_path, "--kills", 6, "--seed", seed, "--steps", 14, "--runs", "splits", "--most-steps", 5,
        "--unforked", 0,
    )  # fmt: skip
    assert said.count("bitwise the undisturbed run") >= 1
    assert re.search(r"^6 kills in \d+ s", said, re.MULTILINE)


@pytest.mark.slow
def test_twenty_kills_of_all_runs_in_several_phases(tmp_path):
    seed = random.randrange(10**6)
    said = soak(tmp_path, "--kills", 20, "--seed", seed)
    (hit,) = re.findall(r"^20 kills in \d+ s: (.*)", said, re.MULTILINE)
    phases = re.findall(r"[1-9]\d* in (\w+)", hit)
    assert len(phases) >= 2, hit  # chance and load decide which of the five
