"""The runner of long tests repeats a failure once, names what passes then, and fails if it fails again."""

import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("run_long.py")

TESTS = """
import pathlib
import pytest

pytestmark = pytest.mark.slow
first = pathlib.Path(__file__).with_name("has-run")

def test_flaky():
    is_second = first.exists()
    first.touch()
    assert is_second

def test_sound():
    pathlib.Path(__file__).with_name("sound").open("a").write("run\\n")
"""
SKIPPED = """
import pathlib
import pytest

pytestmark = pytest.mark.slow
first = pathlib.Path(__file__).with_name("has-run")

def test_skipped():
    if first.exists():
        pytest.skip("something is missing now")
    first.touch()
    assert False
"""
RENAMED = """
import pathlib
import pytest

pytestmark = pytest.mark.slow
first = pathlib.Path(__file__).with_name("has-run")

@pytest.mark.parametrize("name", ["new" if first.exists() else "old"])
def test_renamed(name):
    assert False

def test_flaky():
    is_second = first.exists()
    first.touch()
    assert is_second
"""
BROKEN = """
def test_broken():
    assert False
"""


def run_long(folder, source):
    (folder / "test_long.py").write_text(source)
    command = [sys.executable, str(RUNNER), "-c", "/dev/null", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_test_that_passes_the_second_time_is_named_as_flaky(tmp_path):
    done = run_long(tmp_path, TESTS)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("flaky (failed, then passed alone): ")
    assert done.stdout.splitlines()[-1].endswith("test_flaky")
    assert (tmp_path / "sound").read_text() == "run\n"  # what passed is not run again


@pytest.mark.slow
def test_a_test_that_fails_twice_fails_the_run(tmp_path):
    done = run_long(tmp_path, TESTS + BROKEN)
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert "test_broken" not in done.stdout.splitlines()[-1]
    assert "test_flaky" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_many_failures_are_not_run_again(tmp_path):
    many = "\n".join(f"def test_{number}(): assert False" for number in range(11))
    done = run_long(tmp_path, f"import pytest\npytestmark = pytest.mark.slow\n{many}\n")
    assert done.returncode == 1
    assert "run again" not in done.stdout


@pytest.mark.parametrize("source", [SKIPPED, RENAMED], ids=["skipped", "renamed"])
def test_a_failure_that_does_not_run_again_is_not_flaky(tmp_path, source):
    done = run_long(tmp_path, source)
    assert done.returncode == 1, done.stdout
    assert done.stdout.splitlines()[-1] == "not every failed test ran again: none of them counts as flaky"
