"""The long tests and `make test-all`: what is run again, what counts as flaky, what fails."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run_long import is_early

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
HANGS = """
import pathlib
import time
import pytest

first = pathlib.Path(__file__).with_name("has-run")

@pytest.mark.slow
def test_hangs():
    if first.exists():
        first.with_name("hangs").touch()
        time.sleep(300)
    first.touch()
    assert False
"""
ORDER = """
import pathlib
import pytest

@pytest.mark.slow
def test_order():
    file = pathlib.Path(__file__)
    with file.with_name("order").open("a") as order:
        order.write(file.name + "\\n")
"""
BROKEN = """
def test_broken():
    assert False
"""
SUITES = """
import pathlib
import pytest

def note(name):
    with pathlib.Path(__file__).with_name("ran").open("a") as file:
        file.write(name + "\\n")

def test_quick():
    note("quick")

def test_quick_broken():
    assert False

@pytest.mark.slow
def test_exhaustive():
    note("exhaustive")
"""


def environment(**variables):
    """That of this process, without an end that it may have been given itself."""
    return {**{name: value for name, value in os.environ.items() if name != "LONG_TESTS_END"}, **variables}


def run_long(folder, source, workers=0, **variables):
    (folder / "test_long.py").write_text(source)
    command = [sys.executable, str(RUNNER), "-c", "/dev/null", "--rootdir", str(folder), str(folder)]
    command += ["-n", str(workers)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**variables))


def test_what_would_start_too_late_is_counted_and_a_failure_still_runs_again(tmp_path):
    ending = "def test_the_time_ends():\n    import os\n    os.environ['LONG_TESTS_END'] = '0'\n"
    late = "def test_late():\n    pathlib.Path(__file__).with_name('late').touch()\n"
    done = run_long(tmp_path, TESTS + ending + late, LONG_TESTS_END=str(int(time.time()) + 1000))
    assert done.returncode == 0, done.stdout
    flaky, left = done.stdout.splitlines()[-2:]
    assert flaky.startswith("flaky")
    assert flaky.endswith("test_flaky")
    assert left == "NOT RUN, for lack of time: 1 tests of test_long.py"
    assert not (tmp_path / "late").exists()


def test_the_half_of_the_files_that_the_end_draws_comes_first(tmp_path):
    names = [f"test_{letter}.py" for letter in "abcdefgh"]
    for name in names:
        (tmp_path / name).write_text(ORDER)
    end = int(time.time()) + 1000
    done = run_long(tmp_path, ORDER, LONG_TESTS_END=str(end))
    assert done.returncode == 0, done.stdout
    early = {
        half: [name for name in [*names, "test_long.py"] if is_early(name, end) is half]
        for half in (True, False)
    }
    assert (tmp_path / "order").read_text().split() == early[True] + early[False]


def test_a_file_is_in_the_first_half_of_every_second_run():
    ends = range(1_800_000_000, 1_800_001_000)
    for file in ("tests/slurm/test_faults.py", "tests/test_quality_bar.py"):
        first = [is_early(f"{file}::test_a", end) for end in ends]
        assert first == [is_early(f"{file}::test_b[1]", str(end)) for end in ends]
        assert 420 < sum(first) < 580  # five standard deviations
    pairs = [tuple(is_early(file, end) for file in ("a.py", "b.py")) for end in ends]
    assert all(150 < pairs.count((a, b)) < 350 for a in (True, False) for b in (True, False))


@pytest.mark.parametrize("end", ["abc", "12:30", "nan", "-5", " "])
def test_an_end_that_is_no_time_is_refused_at_once(tmp_path, end):
    done = run_long(tmp_path, BROKEN, LONG_TESTS_END=end)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"LONG_TESTS_END={end} is no time in whole seconds since 1970, as `date +%s` prints it\n"
    )
    assert done.stdout == ""


def test_a_test_that_passes_the_second_time_is_named_as_flaky(tmp_path):
    done = run_long(tmp_path, TESTS)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("flaky (failed, then passed alone): ")
    assert done.stdout.splitlines()[-1].endswith("test_flaky")
    assert (tmp_path / "sound").read_text() == "run\n"  # what passed is not run again


@pytest.mark.slow
def test_a_test_that_fails_twice_fails_the_run(tmp_path):
    done = run_long(tmp_path, TESTS + BROKEN, workers=3)
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert "test_broken" not in done.stdout.splitlines()[-1]
    assert "test_flaky" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_what_runs_again_for_too_long_has_failed(tmp_path):
    (tmp_path / "test_long.py").write_text(HANGS)
    shorter = "import run_long, sys; run_long.AGAIN_SECONDS = 0; sys.exit(run_long.main(sys.argv[1:]))"
    command = [sys.executable, "-c", shorter, "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    more = {"LONG_TESTS_END": str(int(time.time()) + 30), "PYTHONPATH": str(RUNNER.parent)}
    done = subprocess.run(
        [*command, "-n", "0"], capture_output=True, text=True, env=environment(**more), timeout=120
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    assert re.search(r"after \d+ s no more tests are run again", done.stdout)
    assert (tmp_path / "hangs").exists()
    assert "flaky" not in done.stdout


@pytest.mark.slow
def test_many_failures_are_not_run_again(tmp_path):
    many = "\n".join(f"def test_{number}(): assert False" for number in range(11))
    done = run_long(tmp_path, f"import pytest\npytestmark = pytest.mark.slow\n{many}\n")
    assert done.returncode == 1
    assert "run again" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("source", [SKIPPED, RENAMED], ids=["skipped", "renamed"])
def test_a_failure_that_does_not_run_again_is_not_flaky(tmp_path, source):
    done = run_long(tmp_path, source)
    assert done.returncode == 1, done.stdout
    assert done.stdout.splitlines()[-1] == "not every failed test ran again: none of them counts as flaky"


def make_test_all(folder, source, *arguments):
    """Run `make test-all` without its checks, in one process, on one file of tests."""
    (folder / "test_file.py").write_text(source)
    files = ["-c", "/dev/null", "--rootdir", str(folder), "-p", "no:cacheprovider", str(folder)]
    selection = " ".join(["-n", "0", *files, *arguments])
    variables = [f"BIN={Path(sys.executable).parent}", f"ARGS={selection}"]
    done = ["-o", "install", "-o", "lint", "-o", "types"]
    command = ["make", "--silent", "test-all", *done, *variables]
    root = RUNNER.parent.parent
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment())


@pytest.mark.slow
def test_a_selection_of_long_tests_alone_runs_them(tmp_path):
    done = make_test_all(tmp_path, SUITES, "-k", "exhaustive")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "ran").read_text() == "exhaustive\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selection", "ran", "is_success"),
    [("quick and not broken", "quick\n", True), ("nothing", "", False), ("quick", "quick\n", False)],
)
def test_only_a_failure_or_two_empty_suites_fail(tmp_path, selection, ran, is_success):
    (tmp_path / "ran").touch()
    done = make_test_all(tmp_path, SUITES, "-k", f"'{selection}'")
    assert (done.returncode == 0) is is_success, done.stdout + done.stderr
    assert (tmp_path / "ran").read_text() == ran
