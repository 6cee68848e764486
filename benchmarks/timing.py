"""Interleaved timing: every round runs each candidate once, so that a machine that slows down slows all."""

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
    """Start the script again with an allocator that keeps what it has.

    Otherwise a CPU run times the page faults of fresh matrices, as a training step, which reuses its memory,
    would not see them. glibc reads these variables when a process starts.
    """
    if not WARM_ALLOCATOR.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **WARM_ALLOCATOR})


def parser(description: str) -> argparse.ArgumentParser:
    """What all benchmarks ask for."""
    options = argparse.ArgumentParser(description=description.split("\n")[0])
    options.add_argument("--device", default="cpu", type=device)
    options.add_argument("--threads", type=positive, default=2)
    options.add_argument("--rounds", type=positive, default=11)
    return options


def device(name: str) -> str:
    if name != "cpu" and not (name == "cuda" and torch.cuda.is_available()):
        raise argparse.ArgumentTypeError(f"{name!r} is not here: cpu" + ", cuda" * torch.cuda.is_available())
    return name


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def interleaved(
    candidates: dict[str, Callable[[], object]],
    rounds: int,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, after two warm-up runs.

    On a CPU by `clock`: `time.process_time` leaves out what others take of a busy machine.
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
    """One run: by `clock` on a CPU, CUDA events on a GPU."""
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
    """Median over the rounds of candidate / peer."""
    return statistics.median(a / b for a, b in zip(times[name], times[peer], strict=True))


def print_table(title: str, times: dict[str, list[float]], peer: str, bytes_moved: int | None = None) -> None:
    """Median, best, ratio to the peer and, where bytes are given, GB/s by the median."""
    print(f"\n{title}")
    for name, values in times.items():
        median, least = statistics.median(values), min(values)
        rate = f"{bytes_moved / median / 1e9:8.1f} GB/s" if bytes_moved else ""
        print(
            f"  {name:<30}{median * 1e3:10.2f} ms  (min {least * 1e3:9.2f}){rate}"
            f"  {ratio(times, name, peer):6.2f} × {peer}"
        )
