"""Interleaved timing: every round runs each candidate once, so a slow phase of the machine affects all."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

WARM_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"}


def keep_freed_memory() -> None:
    """Restart the script with an allocator that keeps freed memory.

    Otherwise a CPU run measures the page faults of fresh matrices. A training step reuses its memory and has
    none. glibc reads these variables only when a process starts.
    """
    if not WARM_ALLOCATOR.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **WARM_ALLOCATOR})


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    options = argparse.ArgumentParser(description=description.split("\n")[0])
    options.add_argument("--device", default="cpu", type=device)
    options.add_argument("--threads", type=positive, default=2)
    options.add_argument("--rounds", type=positive, default=11)
    return options


def device(name: str) -> str:
    if name != "cpu" and not (name == "cuda" and torch.cuda.is_available()):
        raise argparse.ArgumentTypeError(
            f"{name!r} is not available: use cpu" + " or cuda" * torch.cuda.is_available()
        )
    return name


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: use 1 or more")
    return int(text)


def interleaved(
    candidates: dict[str, Callable[[], object]],
    rounds: int,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, after two warm-up runs.

    On a CPU the time is that of `clock`. `time.process_time` excludes other processes on a busy machine.
    """
    for run in candidates.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            times[name].append(seconds(run, device, clock))
    return times


def seconds(run: Callable[[], object], device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one run: by `clock` on a CPU, by CUDA events on a GPU."""
    if device == "cpu":
        started = clock()
        run()
        return clock() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def ratio(times: dict[str, list[float]], name: str, peer: str) -> float:
    """Median of candidate / peer over the rounds."""
    return statistics.median(a / b for a, b in zip(times[name], times[peer], strict=True))


def print_table(title: str, times: dict[str, list[float]], peer: str, bytes_moved: int | None = None) -> None:
    """Print median, minimum, ratio to the peer and, if `bytes_moved` is given, GB/s by the median."""
    print(f"\n{title}")
    for name, values in times.items():
        median, least = statistics.median(values), min(values)
        rate = f"{bytes_moved / median / 1e9:8.1f} GB/s" if bytes_moved else ""
        print(
            f"  {name:<30}{median * 1e3:10.2f} ms  (min {least * 1e3:9.2f}){rate}"
            f"  {ratio(times, name, peer):6.2f} × {peer}"
        )
