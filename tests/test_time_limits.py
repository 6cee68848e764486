"""A test that hangs fails with its name and its stack, and what was forked before goes on."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = Path(__file__).parent

HANGS = """
import os
import subprocess
import time

import pytest

@pytest.fixture(scope="module")
def forked():
    pid = os.fork()
    if pid == 0:
        time.sleep(0.6)  # longer than the limit of a test
        os._exit(7)
    return pid

def test_hangs(forked):
    subprocess.run(["sleep", "60"])

def test_the_forked_process_goes_on(forked):
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 7
"""


def test_a_hung_test_is_named_with_its_stack_and_the_next_one_runs(tmp_path):
    (tmp_path / "test_hung.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["-o", "timeout=0.4", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert 'subprocess.run(["sleep", "60"])' in done.stdout  # a line of the stack
    assert "Failed: Timeout (>0.4s)" in done.stdout
    assert "test_hung.py::test_hangs" in done.stdout


def test_every_quick_test_has_a_limit(pytestconfig):
    assert 0 < float(pytestconfig.getini("timeout")) <= 300
    assert pytestconfig.getini("timeout_method") == "signal"


def test_no_long_test_may_take_longer_than_continuous_integration_allows_for(pytestconfig):
    """Failed tests run again until minute 80, and the last long test ends by minute 75."""
    limits = re.findall(r"mark\.timeout\((\d+)", "".join(path.read_text() for path in TESTS.rglob("*.py")))
    [longest] = re.findall(r"^SLOW_LIMIT = (\d+)", (TESTS / "conftest.py").read_text(), re.MULTILINE)
    assert all(int(limit) <= int(longest) for limit in limits)
    assert int(longest) < pytestconfig.getini("faulthandler_timeout") <= 20 * 60
    [start] = re.findall(r"LONG_TESTS_END=.* \+ (\d+) \* 60", (ROOT / ".ci" / "run").read_text())
    [again] = re.findall(r"^AGAIN_SECONDS = (\d+) \* 60", (TESTS / "run_long.py").read_text(), re.MULTILINE)
    assert int(start) + max(20, int(again)) <= 85  # of 90
