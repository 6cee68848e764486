"""Interleaved timing: every round runs each candidate, so a slow phase of the machine affects all.

A figure of a GPU is printed with its clock and power, because both depend on what ran before.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

REPEATS = 20  # runs between two events on a GPU
SLEEP_CYCLES = 5_000_000  # at least; 2.5 ms
CYCLES_PER_SECOND = 2e9  # about the highest clock of a GPU
CACHES = 4  # a tensor of so many L2 caches is no longer there at the next run
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


class GpuState(NamedTuple):
    """What NVIDIA's driver says of a GPU at one moment."""

    clock_mhz: int  # of the multiprocessors
    power_watts: float


class Times(dict[str, list[float]]):
    """Seconds of each candidate in each round; on a GPU, also its state in each round, while it was busy."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__({name: [] for name in names})
        self.states: dict[str, list[GpuState]] = {name: [] for name in self}

    def state(self, name: str) -> GpuState | None:
        """Median clock and power of a candidate; `None` on a CPU, or without NVIDIA's driver."""
        states = self.states[name]
        if not states:
            return None
        return GpuState(*(statistics.median(values) for values in zip(*states, strict=True)))


def interleaved(
    candidates: dict[str, Callable[[], object]],
    rounds: int,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Seconds of each candidate in each round, after two warm-up runs.

    On a CPU the time is that of `clock`. `time.process_time` excludes other processes on a busy machine.
    """
    for run in candidates.values():
        run()
        run()
    times = Times(candidates)
    for _ in range(rounds):
        for name, run in candidates.items():
            if device == "cpu":
                times[name].append(seconds(run, device, clock))
            else:
                taken, state = gpu_seconds(run)
                times[name].append(taken)
                times.states[name] += [state] if state else []
    return times


def seconds(run: Callable[[], object], device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one run: by `clock` on a CPU, by CUDA events on a GPU."""
    if device == "cpu":
        started = clock()
        run()
        return clock() - started
    return gpu_seconds(run, repeats=1)[0]


def gpu_seconds(run: Callable[[], object], repeats: int = REPEATS) -> tuple[float, GpuState | None]:
    """Seconds of one run on the GPU, the mean of some repeats, and the GPU's state while they ran.

    The GPU first sleeps for longer than the host needs to queue the runs. Otherwise the time between two
    short kernels would be the host's. A run that waits for the GPU is timed with that wait.
    """
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    queueing = time.perf_counter() - started
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(max(SLEEP_CYCLES, int(2 * queueing * repeats * CYCLES_PER_SECOND)))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    state = gpu_state()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats, state


def gpu_state() -> GpuState | None:
    """Clock and power of the current GPU; `None` if NVIDIA's driver does not say."""
    opened = _nvml()
    if opened is None:
        return None
    library, handle = opened
    clock, power = ctypes.c_uint(), ctypes.c_uint()
    if library.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(clock)):  # 1: the multiprocessors' clock
        return None
    if library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power)):
        return None
    return GpuState(clock.value, power.value / 1000)


@functools.lru_cache(maxsize=1)
def _nvml() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """NVIDIA's management library, which comes with the driver, and its handle of the current GPU."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    identity = f"GPU-{torch.cuda.get_device_properties().uuid}".encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(identity, ctypes.byref(handle)):
        return None
    return library, handle


def cache_note(num_bytes: int, device: str) -> str:
    """A warning if a tensor stays in the GPU's cache between runs, which a training step's do not; or ""."""
    if device == "cpu":
        return ""
    cache = torch.cuda.get_device_properties().L2_cache_size
    if num_bytes >= CACHES * cache:
        return ""
    return (
        f"{num_bytes / 1e6:.0f} MB are less than {CACHES} × the L2 cache of {cache / 1e6:.0f} MB: "
        "times may be those of the cache; choose a larger size"
    )


def ratio(times: dict[str, list[float]], name: str, peer: str) -> float:
    """Median of candidate / peer over the rounds."""
    return statistics.median(a / b for a, b in zip(times[name], times[peer], strict=True))


def print_table(title: str, times: dict[str, list[float]], peer: str, bytes_moved: int | None = None) -> None:
    """Print median, minimum, ratio to the peer and, if `bytes_moved` is given, GB/s by the median."""
    print(f"\n{title}")
    for name, values in times.items():
        median, least = statistics.median(values), min(values)
        rate = f"{bytes_moved / median / 1e9:8.1f} GB/s" if bytes_moved else ""
        state = times.state(name) if isinstance(times, Times) else None
        note = f"  {state.clock_mhz:5.0f} MHz {state.power_watts:4.0f} W" if state else ""
        print(
            f"  {name:<30}{median * 1e3:10.3f} ms  (min {least * 1e3:10.3f}){rate}"
            f"  {ratio(times, name, peer):6.2f} × {peer}{note}"
        )
