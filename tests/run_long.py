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

ROOT = Path(__file__).parent.parent
WORKERS = 3  # of one thread each, on two cores: long tests often wait for processes
MOST_REPEATED = 10
TESTS_FAILED = 1  # pytest's exit code


def run_pytest(cache, *arguments):
    command = [sys.executable, "-m", "pytest", "-m", "slow", "-o", f"cache_dir={cache}", *arguments]
    return subprocess.run(command, cwd=ROOT).returncode


def failures(cache):
    """The ids of the tests that failed last time."""
    path = Path(cache) / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def main(arguments):
    with tempfile.TemporaryDirectory(prefix="pytest-cache-") as cache:
        code = run_pytest(
            cache,
            "-n",
            str(WORKERS),
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            "--durations=25",
            *arguments,
        )
        failed = failures(cache)
        if code != TESTS_FAILED or not failed or len(failed) > MOST_REPEATED:
            return code
        print(f"run again, alone: {', '.join(failed)}", flush=True)
        code = run_pytest(cache, "--last-failed", "--last-failed-no-failures=none", *arguments)
        flaky = sorted(set(failed) - set(failures(cache)))
        if flaky:
            print(f"flaky (failed, then did not fail alone): {', '.join(flaky)}", flush=True)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
