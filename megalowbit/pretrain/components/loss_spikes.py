"""Which losses stand out above those before them, and when the loss as a whole has risen.

Two questions, both asked of the logarithm of the loss, which is nearly symmetric about its trend where the
loss itself has a tail towards high values (small batches). *Does this step stand out?* Its distance above the
median of the last `window` losses, in deviations: 1.4826 times the median absolute deviation, which a few
spikes in the window do not move and which the steep start of a run only widens. *Has the loss risen?* The
median of a full window, against the lowest such median so far: a divergence moves it for good, a spike not
at all. After a rise has been found, further ones are measured from where it has come to.

A falling loss is never told. Not covered: a loss that rises by less than LEAST_RISE, or within a run's first
window; a loss that ought to rise (harder data, a learning rate that starts again) is found to have risen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from megalowbit.pretrain.components.loss_guard_settings import SHORTEST_WINDOW, LossGuardSettings

NORMAL = 1.4826  # deviation of a normal distribution in median absolute deviations
LEAST_DEVIATION = 0.002  # of log loss; a loss that hardly varies must not make every step a spike
RISE = 1.5  # deviations of single steps by which the median of a window has risen
LEAST_RISE = 0.02  # of log loss: less than 2 % is not worth a word
LEAST_LOSS = 1e-9  # below it the logarithm says nothing any more


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a step's loss was like.

    Attributes:
        spike: what to say of it if it stands out; `None` if it does not.
        rise: what to say if the loss has risen and stays, as of this step; otherwise `None`.
    """

    spike: str | None = None
    rise: str | None = None


class _Level(NamedTuple):
    """Where losses lie, and how far from it single ones usually are."""

    median: float
    deviation: float

    @classmethod
    def of(cls, values: list[float]) -> _Level:
        middle = median(values) if values else 0.0
        deviation = NORMAL * median(abs(value - middle) for value in values) if values else 0.0
        return cls(middle, max(deviation, LEAST_DEVIATION))


class LossSpikes:
    """Judges losses one by one; pure arithmetic on what it was given, so equal losses give equal findings.

    Args:
        settings: `spike_deviations` and `window`.
    """

    def __init__(self, settings: LossGuardSettings) -> None:
        self._threshold, self._length = settings.spike_deviations, settings.window
        self._losses: list[float] = []  # logarithms, newest last
        self._level = _Level.of(self._losses)
        self._lowest: _Level | None = None  # of the full windows so far
        self._low_until = 0  # the last step at which the median was near the lowest

    @property
    def low_until(self) -> int:
        """A step up to which the loss had not begun to rise: that long ago the window was all low."""
        return self._low_until - self._length

    def add(self, step: int, loss: float) -> Finding:
        """Judge the loss of a step.

        Args:
            step: its number, ascending.
            loss: finite.
        """
        value = math.log(max(loss, LEAST_LOSS))
        spike = self._spike(value, loss)
        self._losses = [*self._losses, value][-self._length :]
        self._level = _Level.of(self._losses)
        return Finding(spike=spike, rise=self._rise(step))

    def _spike(self, value: float, loss: float) -> str | None:
        if len(self._losses) < SHORTEST_WINDOW:
            return None
        deviations = (value - self._level.median) / self._level.deviation
        if deviations <= self._threshold:
            return None
        usual = f"{math.exp(self._level.median):.4g}, the median of the last {len(self._losses)} steps"
        return f"loss {loss:.4g} is {deviations:.3g} deviations above {usual}"

    def _rise(self, step: int) -> str | None:
        if len(self._losses) < self._length:
            self._low_until = step
            return None
        level = self._level
        if self._lowest is None or level.median < self._lowest.median:
            self._lowest = level
        lowest = self._lowest
        rise, allowed = level.median - lowest.median, max(RISE * lowest.deviation, LEAST_RISE)
        if rise <= allowed / 2:
            self._low_until = step
        if rise <= allowed:
            return None
        self._lowest = level
        now, before = math.exp(level.median), math.exp(lowest.median)
        return (
            f"the loss has risen and stays: {now:.4g} is the median of the last {self._length} steps, after "
            f"{before:.4g} at its lowest"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for the checkpoint."""
        return {
            "losses": list(self._losses),
            "lowest": None if self._lowest is None else list(self._lowest),
            "low_until": self._low_until,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, also with a window of another length."""
        self._losses = [float(each) for each in state["losses"]][-self._length :]
        self._level = _Level.of(self._losses)
        self._lowest = None if state["lowest"] is None else _Level(*map(float, state["lowest"]))
        self._low_until = int(state["low_until"])
