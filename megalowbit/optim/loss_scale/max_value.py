"""A loss scale that keeps the largest gradient near a target below fp16's limit.

The higher S is, the fewer gradients become zero; the target leaves room for the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megalowbit.optim.loss_scale.gradient_based import AmaxGradScaler, AmaxSettings


class MaxValueGradScaler(AmaxGradScaler):
    """S = target ÷ largest gradient; increases are smoothed, decreases are immediate.

    u = min(mean of x, smallest x since S last moved), with x = log2(target / amax): smoothing only delays
    growth. A short memory is therefore safe: 0.9, ten steps, spans a few batches of small gradients, while
    0.99 leaves S octaves behind shrinking gradients.

    Args:
        target: target of the largest scaled gradient, at most 65504.
        ema_decay: factor in [0, 1) by which a step's weight in the mean decreases with each later step.
        **common: see `StrategyGradScaler`.
    """

    NAME = "max_value"
    STATE: ClassVar[Mapping[str, float | None]] = {**AmaxGradScaler.STATE, "recent": None}

    _recent: float | None

    def _gather_octave(self, octave: float, loss_scale: float) -> None:  # noqa: ARG002
        self._recent = octave if self._recent is None else min(self._recent, octave)

    def _wanted(self) -> float | None:
        if self._mean is None or self._recent is None:
            return None
        wanted = min(self._mean, self._recent)
        self._recent = None
        return wanted


class MaxValueSettings(AmaxSettings):
    """S is the target divided by the largest gradient: raised slowly, lowered at once."""

    SCALER = MaxValueGradScaler

    type: Literal["max_value"] = "max_value"
