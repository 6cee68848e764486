"""Loss scales set from the gradients themselves: their largest value, what they lose, or both.

`MaxValueGradScaler` puts the largest gradient near a target below fp16's limit; `NormRatioGradScaler` raises
S while gradients are lost to zero; `MaxNormGradScaler` joins the two; `ControllerGradScaler` steers the
largest scaled gradient like a thermostat. All work in octaves, u = log2 S, and share `strategy_base`'s bounds
and backoff. Statistics are taken without the scale: the largest *scaled* gradient moves with S itself, and
feeding it back makes S swing. A mean of logarithms is used, because an arithmetic mean of target / amax
follows its largest summand and overshoots. Scales per layer are in `layer_scaling`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from megalowbit.optim.loss_scale.base import GradientStatistics
from megalowbit.optim.loss_scale.gradient_based import LARGEST_HALF, StrategyGradScaler, octaves_below
from megalowbit.optim.loss_scale.rules import check, is_count, is_positive

TARGET = 2.0**15  # one octave below the limit of fp16


class AmaxGradScaler(StrategyGradScaler):
    """Base of the strategies that look at the largest gradient: x = log2(target / amax) and its mean.

    Args:
        target: largest scaled gradient aimed at, at most 65504.
        ema_decay: factor in [0, 1) by which a step's weight in the mean falls at each later step.
        **common: see `StrategyGradScaler`.
    """

    STATE: ClassVar[Mapping[str, float | None]] = {"mean": None, "weight": 0.0}
    needs_amax = True

    _mean: float | None
    _weight: float  # sum of the weights in the mean, 1 − decay^n, which corrects its bias

    def __init__(
        self, initial_scale: float = 2.0**15, min_scale: float = 1.0, *,
        target: float = TARGET, ema_decay: float = 0.9, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(initial_scale, min_scale, **common)
        check("target", target, is_positive(target) and target <= LARGEST_HALF, f"in (0, {LARGEST_HALF:g}]")
        is_decay = ema_decay == 0 or (is_positive(ema_decay) and ema_decay < 1)
        check("ema_decay", ema_decay, is_decay, "in [0, 1)")
        self.target = float(target)
        self.ema_decay = float(ema_decay)

    def _gather(self, statistics: GradientStatistics) -> None:
        octave = octaves_below(self.target, statistics.amax)
        if octave is None:
            return
        self._weight = 1.0 - self.ema_decay * (1.0 - self._weight)
        if self._mean is None:
            self._mean = octave
        else:  # the corrected mean itself, so that equal values keep it where it is
            self._mean += (1.0 - self.ema_decay) / self._weight * (octave - self._mean)
        self._gather_octave(octave, statistics.loss_scale)

    @abstractmethod
    def _gather_octave(self, octave: float, loss_scale: float) -> None:
        """Take in x of a clean step whose gradients were multiplied by `loss_scale`."""

    def _level(self) -> float | None:
        return self._mean


class MaxValueGradScaler(AmaxGradScaler):
    """S = target ÷ largest gradient, smoothed upwards and immediate downwards.

    u = min(mean of x, smallest x since S last moved), where x = log2(target / amax): smoothing delays growth
    only. That makes a short memory sound: 0.9, ten steps, outlasts a few batches of small gradients, while
    0.99 leaves S octaves behind gradients that shrink.

    Args:
        target: largest scaled gradient aimed at, at most 65504.
        ema_decay: factor in [0, 1) by which a step's weight in the mean falls at each later step.
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


class ProbingGradScaler(StrategyGradScaler):
    """Base of the strategies that compare norms with fp32 ones every so many steps.

    Args:
        epsilon: share of the norm, and of the elements, that may be lost; in (0, 1).
        probe_every: steps from probe to probe.
        **common: of the class beside it, or see `StrategyGradScaler`.
    """

    probes = True

    def __init__(
        self, initial_scale: float = 2.0**15, min_scale: float = 1.0, *,
        epsilon: float = 0.05, probe_every: int = 100, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(initial_scale, min_scale, **common)
        check("epsilon", epsilon, is_positive(epsilon) and epsilon < 1, "in (0, 1)")
        check("probe_every", probe_every, is_count(probe_every), "a whole number > 0")
        self.epsilon = float(epsilon)
        self.probe_every = probe_every

    @property
    def wants_probe(self) -> bool:
        # counted in clean steps: a probe whose step overflowed is repeated
        return self._steps % self.probe_every == 0


class NormRatioGradScaler(ProbingGradScaler):
    """S grows while the half-precision gradients lack what fp32 ones have; overflow alone lowers it.

    Every `probe_every` steps the norm of sampled weight gradients in fp32 is compared with that of the same
    in half precision. They count as lost where the ratio exceeds 1 + `epsilon` or a share above `epsilon` of
    the elements became zero: S then grows by one octave. A ratio below 1 says nothing. A threshold of 8,
    which is sometimes recommended, waits until 98 % of the squared norm is gone.

    Args:
        **arguments: those of `ProbingGradScaler`.
    """

    NAME = "norm_ratio"
    STATE: ClassVar[Mapping[str, float | None]] = {"is_losing": False}

    _is_losing: bool

    def _gather(self, statistics: GradientStatistics) -> None:
        verdict = is_losing(statistics, self.epsilon)
        self._is_losing = self._is_losing if verdict is None else verdict

    def _wanted(self) -> float | None:
        if not self._is_losing:
            return None
        self._is_losing = False  # one octave for one probe
        return self._exponent + 1.0

    def _after_backoff(self) -> None:
        self._is_losing = False


class MaxNormGradScaler(ProbingGradScaler, MaxValueGradScaler):
    """`MaxValueGradScaler` with a floor that norm probes raise.

    A probe that finds gradients lost lifts the floor one octave above the S of its step, even past the
    target; S stays at or above the floor, but never where the last amax is known to overflow. An overflow
    takes S down and the floor with it. Nothing else lowers the floor, and nothing else needs to: it binds
    only between target and limit, or while the mean lags.

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


class ControllerGradScaler(AmaxGradScaler):
    """A thermostat for the largest scaled gradient: u += gain · clip(log2 target − log2(scaled amax)).

    Args:
        target: largest scaled gradient aimed at, at most 65504.
        gain: share of the error that one move corrects, in (0, 0.5]; more of it oscillates.
        clip: errors, in octaves, are limited to ±clip, so that one strange batch moves S little.
        dead_band: errors up to so many octaves move nothing; below 0.5 S, a power of two, could never rest.
        **arguments: see `StrategyGradScaler`; `ema_decay` is of the mean that patience looks at.
    """

    NAME = "controller"
    STATE: ClassVar[Mapping[str, float | None]] = {
        **AmaxGradScaler.STATE,
        "octave": -math.inf,
        "error_sum": 0.0,
        "error_count": 0,
    }

    _octave: float  # u, of which S has the whole octaves
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
        # the mean error of the steps between two moves: u itself may not run ahead of S
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
        # held back by a bound or by an overflow, u stays with S: what it piled up would be spent later
        if not exponent <= self._octave <= exponent + 1:
            self._octave = float(exponent)

    def _after_backoff(self) -> None:
        self._octave = float(self._exponent)
        self._error_sum, self._error_count = 0.0, 0


def is_losing(statistics: GradientStatistics, epsilon: float) -> bool | None:
    """Whether a probe found gradients lost to zero; None if there was none. NaN is no loss."""
    ratio, flushed = statistics.norm_ratio, statistics.flushed_fraction
    if ratio is None and flushed is None:
        return None
    return (ratio is not None and ratio > 1.0 + epsilon) or (flushed is not None and flushed > epsilon)
