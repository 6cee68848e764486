"""Runs killed at random moments and resumed are bitwise equal to an uninterrupted run.

The runs are short here, because each start pays for its imports; `kill_soak.py --kills 200` kills longer
ones of every kind with the same checks. A run with speculation is killed in test_pretrain_speculation.py.
"""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import ROOT, built_libraries, copy_libraries, make_cache

SOAK = ROOT / "tests" / "launch" / "kill_soak.py"


def soak(folder, *arguments):
    """What a soak says; fails with it if a run was not alike, or ended in another way than runs may."""
    make_cache(folder / "cache")
    command = [sys.executable, SOAK, "--folder", folder, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    copy_libraries(folder / "cache", Path(built_libraries().name))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    return done.stdout


@pytest.mark.slow
def test_runs_killed_repeatedly_equal_uninterrupted_ones_bitwise(tmp_path):
    seed = random.randrange(10**6)  # printed, and with every failure
    said = soak(
        tmp_path, "--kills", 6, "--seed", seed, "--steps", 14, "--most-steps", 5,
        "--runs", "splits", "parameters",
    )  # fmt: skip
    for run in ("splits-0", "parameters-1"):
        assert re.search(rf"^{run}: [1-9] kills, bitwise the undisturbed run", said, re.MULTILINE), run
    (hit,) = re.findall(r"^6 kills in \d+ s: (.*)", said, re.MULTILINE)
    phases = re.findall(r"[1-9]\d* in (\w+)", hit)
    assert "import" in phases, hit  # the first kill; load decides about the others
    assert len(phases) >= 2, hit
