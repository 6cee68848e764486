"""Run the tests marked `slow`. Run each failure once more, alone, and report it as flaky if it passes then.

    python tests/run_long.py [arguments for both pytest runs]

A long test that fails on a busy machine only must not stop a release, but nobody may miss it either: the last
line names it. More than `MOST_REPEATED` failures are not a flaky test; they are not run again.

If LONG_TESTS_END is set, in seconds since 1970, no test starts after it, except those that are run again.
These are stopped `AGAIN_SECONDS` after it, and what has not run again by then has failed. The last line
counts the tests that are left and names their files. They fail nothing. Which half of the files comes first
is drawn from the end, so that a machine that is too slow for all of them runs all of them in a few runs.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
WORKERS = 4  # of one thread each, on two cores: long tests often wait for processes
MOST_REPEATED = 10
AGAIN_SECONDS = 25 * 60  # after the end
TESTS_FAILED = 1  # pytest's exit code
END, LEFT = "LONG_TESTS_END", "LONG_TESTS_LEFT"  # when tests no longer start; where their names are written


def is_early(test, end):
    """Whether a test's file is of the half that comes first in a run with this end; as likely as not."""
    file = test.partition("::")[0]
    return hashlib.sha256(f"{end} {file}".encode()).digest()[0] % 2 == 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep the order within each half of the files: this file is a plugin of the first pytest run."""
    items.sort(key=lambda item: not is_early(item.nodeid, os.environ[END]))


def pytest_runtest_setup(item):
    """Skip what would start too late."""
    if time.time() > float(os.environ[END]):
        with Path(os.environ[LEFT]).open("a", encoding="utf-8") as file:  # of all workers
            file.write(f"{item.nodeid}\n")
        pytest.skip("the time for long tests is over")


def time_of(text):
    """Seconds since 1970, as `date +%s` prints them."""
    if not text.isdecimal():
        sys.exit(f"{END}={text} is no time in whole seconds since 1970, as `date +%s` prints it")
    return int(text)


def limited(environment, left):
    """The environment and pytest's arguments under which no test starts after the end."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), environment.get("PYTHONPATH"))))
    return {**environment, LEFT: str(left), "PYTHONPATH": path}, ("-p", Path(__file__).stem)


def run_pytest(cache, *arguments, environment=None, seconds=None):
    """Pytest's exit code. It is interrupted after `seconds`, and ends with a summary and code 2."""
    command = [sys.executable, "-m", "pytest", "-m", "slow", "-o", f"cache_dir={cache}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"after {seconds:.0f} s no more tests are run again", flush=True)
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    except KeyboardInterrupt:
        pass  # pytest is interrupted too
    return process.wait()


def failures(cache):
    """The ids of the tests that failed last time."""
    path = Path(cache) / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def num_skipped(report):
    """The number of skipped tests in a report of `--junitxml`."""
    return len(list(ElementTree.parse(report).iter("skipped")))


def main(arguments):
    with tempfile.TemporaryDirectory(prefix="pytest-cache-") as cache:
        shared_out = ("-n", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder")
        environment, plugin, end, not_run = None, (), None, Path(cache) / "left"
        if os.environ.get(END):
            end = time_of(os.environ[END])
            environment, plugin = limited(dict(os.environ), not_run)
        code = run_pytest(cache, *shared_out, *plugin, "--durations=25", *arguments, environment=environment)
        failed = failures(cache)
        if code == TESTS_FAILED and 0 < len(failed) <= MOST_REPEATED:
            seconds = max(0.0, end + AGAIN_SECONDS - time.time()) if plugin else None
            code = run_again(cache, failed, arguments, seconds)
        if not_run.exists():
            left = not_run.read_text(encoding="utf-8").splitlines()
            files = sorted({name.partition("::")[0] for name in left})
            print(f"NOT RUN, for lack of time: {len(left)} tests of {', '.join(files)}", flush=True)
        return code


def run_again(cache, failed, arguments, seconds):
    """Run each failed test alone, and name those that pass now; returns the exit code."""
    print(f"run again, alone: {', '.join(failed)}", flush=True)
    report = Path(cache) / "again.xml"
    selection = ("--last-failed", "--last-failed-no-failures=none")
    code = run_pytest(cache, *selection, *arguments, f"--junitxml={report}", seconds=seconds)
    left = failures(cache)  # includes tests that were not collected under this name again
    if code == 0 and (left or num_skipped(report)):
        print("not every failed test ran again: none of them counts as flaky", flush=True)
        return TESTS_FAILED
    if left:
        print(f"failed, or not run again: {', '.join(left)}", flush=True)
    flaky = sorted(set(failed) - set(left))
    if flaky:
        print(f"flaky (failed, then passed alone): {', '.join(flaky)}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
