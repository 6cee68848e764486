"""A loss scale that controls the largest scaled gradient like a thermostat.

It corrects a part of the error at a time, while `max_value` moves to the target immediately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megalowbit.optim.loss_scale.base import PositiveNumber, check, is_positive
from megalowbit.optim.loss_scale.gradient_based import AmaxGradScaler, AmaxSettings
from megalowbit.values import unit


class ControllerGradScaler(AmaxGradScaler):
    """A thermostat for the largest scaled gradient: u += gain · clip(log2 target − log2(scaled amax)).

    Args:
        target: target of the largest scaled gradient, at most 65504.
        gain: share of the error that one move corrects, in (0, 0.5]; a larger gain oscillates.
        clip: errors, in octaves, are limited to ±clip, so that a single unusual batch moves S little.
        dead_band: errors up to this number of octaves are ignored. Below 0.5, S would never settle, because
            it is a power of two.
        **arguments: see `StrategyGradScaler`; `ema_decay` applies to the mean used after an overflow.
    """

    NAME = "controller"
    STATE: ClassVar[Mapping[str, float | None]] = {
        **AmaxGradScaler.STATE,
        "octave": -math.inf,
        "error_sum": 0.0,
        "error_count": 0,
    }

    _octave: float  # u; S is 2 to the power of u rounded down
    _error_sum: float
    _error_count: int

    def __init__(
        self, initial_scale: float = 2.0**15, min_scale: float = 1.0, *,
        gain: float = 0.5, clip: float = 2.0, dead_band: float = 0.5, **arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(initial_scale, min_scale, **arguments)
        check("gain", gain, is_positive(gain) and gain <= 0.5, "in (0, 0.5]")
        check("clip", clip, is_positive(clip), "a finite number > 0")
        is_band = dead_band == 0 or (is_positive(dead_band) and dead_band < clip)
        check("dead_band", dead_band, is_band, f"in [0, clip ({clip}))")
        self.gain, self.clip, self.dead_band = float(gain), float(clip), float(dead_band)

    def _gather_octave(self, octave: float, loss_scale: float) -> None:
        # Use the mean error of the steps between two moves. Changing u at every step could move it away from
        # S.
        self._error_sum += octave - math.log2(loss_scale)
        self._error_count += 1

    def _wanted(self) -> float | None:
        if not self._error_count:
            return None
        error = self._error_sum / self._error_count
        self._error_sum, self._error_count = 0.0, 0
        if abs(error) <= self.dead_band:
            return None
        self._octave += self.gain * min(max(error, -self.clip), self.clip)
        return self._octave

    def _set_exponent(self, exponent: int) -> None:
        super()._set_exponent(exponent)
        # If a bound or an overflow limits S, u follows it: an accumulated difference would act later.
        if not exponent <= self._octave <= exponent + 1:
            self._octave = float(exponent)

    def _after_backoff(self) -> None:
        self._octave = float(self._exponent)
        self._error_sum, self._error_count = 0.0, 0


class ControllerSettings(AmaxSettings):
    """A feedback controller keeps the largest scaled gradient near the target, with smooth changes of S."""

    SCALER = ControllerGradScaler

    type: Literal["controller"] = "controller"
    gain: Annotated[PositiveNumber, Field(le=0.5)] = Field(
        default=0.5, description="fraction of the error that one change of S corrects; more would oscillate"
    )
    clip: PositiveNumber = Field(
        default=2.0,
        description="errors are limited to ±clip, which bounds the effect of a single unusual batch",
        json_schema_extra=unit("octaves"),
    )
    dead_band: Annotated[float, Field(ge=0)] = Field(
        default=0.5,
        description="smaller errors change nothing. Below 0.5, S (a power of two) would never settle",
        json_schema_extra=unit("octaves"),
    )
