"""Damaged runs by the real command."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_damaged_runs_resume_unchanged_or_report_one_line():
    script = Path(__file__).with_name("checkpoint_fuzz_runs.py")
    command = [sys.executable, script, "--cases", "6", "--seed", "1010"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    went_on, refused = map(int, re.findall(r"'went on': (\d+), 'refused': (\d+)", done.stdout)[0])
    assert went_on + refused == 6
    assert min(went_on, refused) > 0, done.stdout
