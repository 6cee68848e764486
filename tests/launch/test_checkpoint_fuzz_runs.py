"""Damaged runs by the real command: two that are always the same, then others for half a minute."""

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_fuzz_runs import Runs


@pytest.mark.slow
def test_damaged_runs_resume_unchanged_or_report_one_line(tmp_path):
    runs = Runs(tmp_path)
    found = [runs.case(seed) for seed in (1, 3)]
    assert [failure for failure, _ in found] == [None, None]


@pytest.mark.slow
def test_half_a_minute_of_damaged_runs():
    script = Path(__file__).with_name("checkpoint_fuzz_runs.py")
    done = subprocess.run([sys.executable, script, "--seconds", "30", "--seed", "1000"], timeout=1200)
    assert done.returncode == 0
