"""Time of each phase of a step, measured without synchronising the device.

A timer that synchronises the device before and after each phase, like Megatron's, makes the step slower. On
CUDA a phase is therefore a pair of events in the stream, which are read after the device has passed them. On
other devices calls return when they are done, and the host's clock is used.

Not covered: several streams in one phase; only the current stream is timed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class StepTimers:
    """Mean time of each named phase.

    ```
    timers = StepTimers(device)
    with timers("inspect"):
        ...
    timers.milliseconds()  # {"inspect": 0.41}
    ```

    Phases may be nested and may repeat. One that ends in an exception is not counted.

    Args:
        device: where the work runs; None for the host.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        self._pending: deque[tuple[str, Any, Any]] = deque()  # CUDA events that may not have passed yet
        self._finished: dict[str, tuple[float, int]] = {}  # (milliseconds, count) since the last report

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the `with` block as `phase`."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            self._finish(phase, (time.perf_counter() - start) * 1e3)
            return
        stream = torch.cuda.current_stream(self._device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        yield
        last.record(stream)
        self._pending.append((phase, first, last))
        self._collect()

    def milliseconds(self) -> dict[str, float]:
        """Mean milliseconds of each phase that has finished since the last call, in order of first finish.

        Never waits: phases that are still running on the device are reported by a later call.
        """
        self._collect()
        means = {phase: total / count for phase, (total, count) in self._finished.items()}
        self._finished.clear()
        return means

    def _finish(self, phase: str, milliseconds: float) -> None:
        # keep a sum and a count, so that memory does not grow if nothing reads them
        total, count = self._finished.get(phase, (0.0, 0))
        self._finished[phase] = (total + milliseconds, count + 1)

    def _collect(self) -> None:
        # events pass in order, so the first that has not passed ends the search
        while self._pending and self._pending[0][2].query():
            phase, first, last = self._pending.popleft()
            self._finish(phase, first.elapsed_time(last))


def timed(timers: StepTimers | None, phase: str) -> AbstractContextManager[None]:
    """`timers(phase)`, or a null context without timers."""
    return nullcontext() if timers is None else timers(phase)
