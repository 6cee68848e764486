"""How long the page of a long run takes, and how large it is.

    python benchmarks/report.py runs/gpt2_tiny_speculative --steps 100000

Repeats the records of a run until they have so many steps: a record of each step, and tables by layer and
precision checks at the intervals that the run had. Prints seconds, CPU seconds and megabytes of a page that
is made by a new process. No peer makes a page of such records, so there is none to compare with.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

TABLES = ("metrics.jsonl", "overflow_layers.jsonl", "speculation.jsonl")


def lengthen(path: Path, steps: int) -> None:
    """Repeat the lines of a file of records, in blocks of one step, until `steps`."""
    blocks: dict[int, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        blocks[json.loads(line)["step"]].append(line)
    known = sorted(blocks)
    interval = min((b - a for a, b in pairwise(known)), default=known[0])
    with path.open("w") as file:
        for number, step in enumerate(range(min(known[0], interval), steps + 1, interval)):
            for line in blocks[known[number % len(known)]]:
                file.write(json.dumps({**json.loads(line), "step": step}) + "\n")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        for name in ("config.json", "attempts.jsonl", *TABLES):
            if (options.run / name).exists():
                shutil.copy(options.run / name, run)
        for name in TABLES:
            if (run / name).exists():
                lengthen(run / name, options.steps)
                print(f"{name:<22}{(run / name).stat().st_size / 1e6:8.1f} MB")
        began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "megalowbit", "report", run], check=True, stdout=subprocess.DEVNULL
        )
        seconds, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        print(f"{'report.html':<22}{(run / 'report.html').stat().st_size / 1e6:8.2f} MB")
        print(f"{options.steps:,} steps: {seconds:.1f} s, {cpu:.1f} s of CPU")


if __name__ == "__main__":
    main()
