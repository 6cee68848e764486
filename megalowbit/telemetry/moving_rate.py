"""Throughput: an amount per second over the last few steps.

The first step of a process compiles, allocates and warms caches, so it is not representative. The clock
starts when the first step *ends*, and the first rate is available after the second step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class MovingRate:
    """Amount per second over a window of steps, and over all steps but the first.

    Args:
        window: number of steps in the moving rate.
        clock: seconds, monotonic.
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.perf_counter) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 step, not {window}")
        self._clock = clock
        self._marks: deque[tuple[float, float]] = deque(
            maxlen=window + 1
        )  # (time, amount so far), one a step
        self._start: tuple[float, float] | None = None
        self.steps = 0  # that the average is over

    def add(self, amount: float) -> float | None:
        """Record the end of a step that processed `amount`; returns the moving rate (first step: `None`)."""
        so_far = self._marks[-1][1] + amount if self._marks else 0.0
        mark = (self._clock(), so_far)
        self._marks.append(mark)
        self.steps += self._start is not None
        self._start = self._start or mark
        return self.now

    @property
    def now(self) -> float | None:
        """Amount per second over the window."""
        return self._between(self._marks[0], self._marks[-1]) if self._marks else None

    @property
    def average(self) -> float | None:
        """Amount per second over all steps but the first."""
        return self._between(self._start, self._marks[-1]) if self._start else None

    @staticmethod
    def _between(first: tuple[float, float], last: tuple[float, float]) -> float | None:
        seconds = last[0] - first[0]
        return (last[1] - first[1]) / seconds if seconds > 0 else None
