"""A loss scale from the largest gradient, with a minimum that norm probes raise.

It combines two ideas: the largest gradient limits how far S may rise, and norm probes show how far it must
rise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from megalowbit.optim.loss_scale.base import GradientStatistics
from megalowbit.optim.loss_scale.gradient_based import LARGEST_HALF
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler, MaxValueSettings
from megalowbit.optim.loss_scale.norm_ratio import ProbingGradScaler, ProbingSettings, is_losing


class MaxNormGradScaler(ProbingGradScaler, MaxValueGradScaler):
    """`MaxValueGradScaler` with a floor that norm probes raise.

    A probe that finds lost gradients raises the floor one octave above the S of its step, even past the
    target. S stays at or above the floor, but not where the last amax is known to overflow. An overflow
    lowers S, and the floor with it. Nothing else lowers the floor. This is sufficient, because the floor
    matters only between target and limit, or while the mean lags.

    Args:
        **arguments: those of `ProbingGradScaler` and `MaxValueGradScaler`.
    """

    NAME = "max_norm"
    STATE: ClassVar[Mapping[str, float | None]] = {**MaxValueGradScaler.STATE, "floor": None}

    _floor: int | None

    def _gather(self, statistics: GradientStatistics) -> None:
        super()._gather(statistics)
        if is_losing(statistics, self.epsilon):
            self._floor = self._exponent + 1

    def _wanted(self) -> float | None:
        recent = self._recent
        wanted = super()._wanted()
        if self._floor is None:
            return wanted
        if wanted is None or recent is None:
            return max(float(self._floor), float(self._exponent))
        limit = recent + math.log2(LARGEST_HALF / self.target)
        return max(wanted, min(float(self._floor), math.floor(limit)))

    def _after_backoff(self) -> None:
        if self._floor is not None:
            self._floor = min(self._floor, self._exponent)


class MaxNormSettings(ProbingSettings, MaxValueSettings):
    """`max_value` with a lower bound that norm probes raise when they find gradients lost to zero."""

    SCALER = MaxNormGradScaler

    type: Literal["max_norm"] = "max_norm"  # type: ignore[assignment]
