"""A test that hangs fails with its name and its stack, and what was forked before goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

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


@pytest.mark.slow
def test_a_slow_test_may_take_longer_but_native_code_longest(request):
    [limit] = request.node.get_closest_marker("timeout").args
    assert 900 <= limit < request.config.getini("faulthandler_timeout")
