"""Run the tests marked `slow`. Run each failure once more, alone, and report it as flaky if it passes then.

    python tests/run_long.py [arguments for both pytest runs]

A long test that fails on a busy machine only must not stop a release, but nobody may miss it either: the last
line names it. More than `MOST_REPEATED` failures are not a flaky test; they are not run again.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
WORKERS = 3  # of one thread each, on two cores: long tests often wait for processes
MOST_REPEATED = 10
TESTS_FAILED = 1  # pytest's exit code


def run_pytest(cache, *arguments):
    command = [sys.executable, "-m", "pytest", "-m", "slow", "-o", f"cache_dir={cache}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return process.wait()  # pytest is interrupted too; it ends by itself, with a summary


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
        code = run_pytest(cache, *shared_out, "--durations=25", *arguments)
        failed = failures(cache)
        if code != TESTS_FAILED or not failed or len(failed) > MOST_REPEATED:
            return code
        print(f"run again, alone: {', '.join(failed)}", flush=True)
        report = Path(cache) / "again.xml"
        selection = ("--last-failed", "--last-failed-no-failures=none")
        code = run_pytest(cache, *selection, *arguments, f"--junitxml={report}")
        left = failures(cache)  # includes tests that were not collected under this name again
        if code == 0 and (left or num_skipped(report)):
            print("not every failed test ran again: none of them counts as flaky", flush=True)
            return TESTS_FAILED
        flaky = sorted(set(failed) - set(left))
        if flaky:
            print(f"flaky (failed, then passed alone): {', '.join(flaky)}", flush=True)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
