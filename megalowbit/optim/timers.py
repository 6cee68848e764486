"""Where a step's time goes, measured without stopping the device.

A timer that synchronises the device before and after each phase, as Megatron's do, makes the step slower
than it was. On CUDA a phase is therefore a pair of events in the stream, read when the device has passed them
by itself; on other devices, where calls return when they are done, it is the host's clock.
Not covered: several streams in one phase; the times are of the stream that is current.
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
        self._pending: deque[tuple[str, Any, Any]] = deque()  # CUDA events not yet seen to have passed
        self._finished: dict[str, tuple[float, int]] = {}  # milliseconds and times since the last report

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what the `with` block does, as `phase`."""
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

        Never waits: phases the device is still busy with are in a later answer.
        """
        self._collect()
        means = {phase: total / count for phase, (total, count) in self._finished.items()}
        self._finished.clear()
        return means

    def _finish(self, phase: str, milliseconds: float) -> None:
        # a sum and a count: nothing grows where nobody reads
        total, count = self._finished.get(phase, (0.0, 0))
        self._finished[phase] = (total + milliseconds, count + 1)

    def _collect(self) -> None:
        # events pass in order, so the first that has not passed ends the search
        while self._pending and self._pending[0][2].query():
            phase, first, last = self._pending.popleft()
            self._finish(phase, first.elapsed_time(last))


def timed(timers: StepTimers | None, phase: str) -> AbstractContextManager[None]:
    """`timers(phase)`, or nothing at all where there are no timers."""
    return nullcontext() if timers is None else timers(phase)
