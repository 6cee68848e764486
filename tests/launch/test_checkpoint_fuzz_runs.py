"""Half a minute of damaged runs by the real command."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_damaged_runs_resume_unchanged_or_report_one_line():
    script = Path(__file__).with_name("checkpoint_fuzz_runs.py")
    done = subprocess.run([sys.executable, script, "--seconds", "30", "--seed", "1000"], timeout=1200)
    assert done.returncode == 0
