"""Runs replica_cases.py in a process of its own: its cases make process groups, other tests leave some."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CASES = Path(__file__).with_name("replica_cases.py")
COUNT = 7


def test_replicas_draw_the_random_numbers_of_their_ranks():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-v", str(CASES)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=CASES.parents[3])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{COUNT} passed" in done.stdout
