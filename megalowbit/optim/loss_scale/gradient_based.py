"""Bases of the loss scales that follow the gradients: octaves, bounds, backoff, patience.

Statistics are taken without the scale: the largest *scaled* gradient depends on S, and feeding it back makes
S oscillate. The mean is of logarithms, because an arithmetic mean of target / amax follows its largest
summand and overshoots. Scales per layer are in `statistics.layer_scaling`.

S is a power of two and moves in octaves (factors of two). Whole octaves are exact in every float format, so a
change of S changes no mantissa. On clean steps a strategy collects statistics and returns the S it aims for.
This class rounds it down, keeps it within the bounds, and lets S rise by at most one octave, once every
`update_every` clean steps. An overflow acts immediately: S falls by one octave, and no statistics are
collected.

After an overflow S stays below the value that overflowed, and regains one octave for every `growth_interval`
clean steps in a row. This patience is needed because statistics come from clean steps only: if gradients
alternate between large and small, the statistics contain the small ones, and S would return to the overflow
after each of them. If the mean of the largest gradient falls meanwhile, S may rise accordingly.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from megalowbit.errors import UserError
from megalowbit.json_text import is_finite_number
from megalowbit.optim.loss_scale.base import (
    Count,
    GradientStatistics,
    GradScaler,
    GradScalerSettings,
    PositiveNumber,
    Scale,
    check,
    check_initial_scale,
    check_scale_bounds,
    is_positive,
)
from megalowbit.optim.loss_scale.state import (
    STRATEGY_KEY,
    check_is_mapping,
    damaged,
    fitted_scale,
    is_whole,
    plain_number,
    read_saved_scaler,
    read_scale,
)
from megalowbit.values import is_count, unit

TARGET = 2.0**15  # one octave below the limit of fp16
LARGEST_HALF = 65504.0
# octaves added before rounding down: a mean of equal values may be a few bits below them
ROUNDING = 1e-6
MOST_OCTAVES = 4096.0  # more than between any two numbers of float64, and than any mean of such ratios
WHOLE_OCTAVES = ("ceiling", "floor")  # each may be None


def octaves_below(target: float, amax: float | None) -> float | None:
    """log2(target / amax); None if amax is 0, infinite, NaN or missing: these carry no information."""
    if amax is None or not 0 < amax < math.inf:
        return None
    return math.log2(target) - math.log2(amax)  # their quotient could overflow


class StrategyGradScaler(GradScaler):
    """A scale that is set from statistics of the gradients.

    Subclasses implement `_gather` and `_wanted`. They list the attributes to save in `STATE`, by name without
    the underscore, each with its initial value.

    Args:
        initial_scale: first S; rounded down to a power of two.
        min_scale: lower bound of S.
        max_scale: upper bound of S.
        growth_interval: clean steps in a row after an overflow before S may return to where it overflowed.
        update_every: S moves only once in this many clean steps, except down on overflow.
        sample: share, in (0, 1], of the parameters or layers to take statistics from.

    Raises:
        UserError: an argument is out of range; the message names it.
    """

    NAME: ClassVar[str]
    STATE: ClassVar[Mapping[str, float | None]] = {}
    COMMON_STATE: ClassVar[Mapping[str, float | None]] = {
        "steps": 0,
        "since_move": 0,
        "since_overflow": 0,
        "ceiling": None,
        "level_at_overflow": None,
    }

    _steps: int  # all clean steps
    _since_move: int  # clean steps since S was last allowed to move
    _since_overflow: int  # clean steps since the ceiling was set or raised
    _ceiling: int | None  # octave that S may not exceed after the last overflow
    _level_at_overflow: float | None

    def __init__(
        self,
        initial_scale: float = 2.0**15,
        min_scale: float = 1.0,
        *,
        max_scale: float = 2.0**32,
        growth_interval: int = 100,
        update_every: int = 1,
        sample: float = 1.0,
    ) -> None:
        check_scale_bounds(initial_scale, min_scale, max_scale)
        check("growth_interval", growth_interval, is_count(growth_interval), "a whole number > 0")
        check("update_every", update_every, is_count(update_every), "a whole number > 0")
        check("sample", sample, is_positive(sample) and sample <= 1, "in (0, 1]")
        self.min_scale, self.max_scale = float(min_scale), float(max_scale)
        self._lowest = math.ceil(math.log2(min_scale))
        self._highest = math.floor(math.log2(max_scale))
        bounds_hold_a_power = self._lowest <= self._highest
        check(
            "max_scale",
            max_scale,
            bounds_hold_a_power,
            f"such that a power of two is ≥ min_scale ({min_scale})",
        )
        first = self._clamped(math.floor(math.log2(initial_scale)))
        super().__init__(2.0**first)
        self.growth_interval = growth_interval
        self.update_every = update_every
        self.sample = float(sample)
        self._restart()
        self._set_exponent(first)

    def update(self, found_inf: bool, statistics: GradientStatistics | None = None) -> float:
        if found_inf:
            self.back_off()
            return self.scale
        self._steps += 1
        if statistics is not None:
            self._gather(statistics)
        self._ease_ceiling()
        self._since_move += 1
        if self._since_move >= self.update_every:
            self._since_move = 0
            self._move_to(self._wanted())
        return self.scale

    def back_off(self) -> bool:
        self._since_move = 0
        self._since_overflow = 0
        is_lower = self._exponent > self._lowest
        self._set_exponent(max(self._exponent - 1, self._lowest))
        self._ceiling = self._exponent
        self._level_at_overflow = self._level()
        self._after_backoff()
        return is_lower

    def restart_growth(self) -> None:
        self._since_move = 0
        self._since_overflow = 0

    def state_dict(self) -> dict[str, Any]:
        """The state on which the next `update` depends: numbers, strings and None under public names."""
        own = {name: getattr(self, f"_{name}") for name in (*self.COMMON_STATE, *self.STATE)}
        return {STRATEGY_KEY: self.NAME, "scale": self.scale, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        From the state of another strategy or library only S is used, rounded down to a power of two; this
        strategy's statistics restart.

        Raises:
            UserError: the state is not a scaler's, lacks a key, or holds an invalid value; then nothing has
                changed.
        """
        scale, values = self._read(state)
        fitted = fitted_scale(scale, 2.0**self._lowest, 2.0**self._highest)
        self._restart(values)
        self._set_exponent(math.floor(math.log2(fitted)))

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        self._read(state)

    def _read(self, state: Mapping[str, Any]) -> tuple[float, dict[str, float | None]]:
        """S of a state, and this strategy's values in it; no values if another strategy wrote it."""
        check_is_mapping(state)
        if state.get(STRATEGY_KEY) != self.NAME:
            return read_saved_scaler(state).scale, {}
        firsts = {**self.COMMON_STATE, **self.STATE}
        missing = [name for name in ("scale", *firsts) if name not in state]
        if missing:
            raise UserError(f"{self.NAME} grad scaler state lacks {', '.join(missing)}")
        values = {name: _state_value(name, state[name], first) for name, first in firsts.items()}
        return read_scale(state, "scale"), values

    def _restart(self, values: Mapping[str, float | None] | None = None) -> None:
        """Set the strategy's state to the initial values, or to `values`."""
        for name, value in {**self.COMMON_STATE, **self.STATE, **(values or {})}.items():
            setattr(self, f"_{name}", value)

    @abstractmethod
    def _gather(self, statistics: GradientStatistics) -> None:
        """Collect the statistics of a clean step."""

    @abstractmethod
    def _wanted(self) -> float | None:
        """The octave that S should have, including fractions; None to leave it."""

    def _after_backoff(self) -> None:
        """Change state that would raise S again directly after an overflow."""

    def _level(self) -> float | None:
        """A slow measure, in octaves, of the S that the gradients tolerate; None: there is none."""
        return None

    def _ease_ceiling(self) -> None:
        self._since_overflow += 1
        if self._ceiling is None:
            return
        if self._since_overflow >= self.growth_interval:
            # by one octave, so a wrong guess costs one overflow
            self._since_overflow = 0
            self._ceiling = self._ceiling + 1 if self._ceiling < self._highest else None
        if self._level_at_overflow is None:
            self._level_at_overflow = self._level()

    def _allowed(self) -> float:
        """The highest octave that bounds, pace and patience allow at present."""
        highest = float(min(self._exponent + 1, self._highest))
        if self._ceiling is None:
            return highest
        level, before = self._level(), self._level_at_overflow
        risen = 0.0 if level is None or before is None else max(level - before, 0.0)
        return min(highest, self._ceiling + risen)

    def _move_to(self, wanted: float | None) -> None:
        if wanted is None or math.isnan(wanted):
            return
        octave = max(min(wanted, self._allowed()), float(self._lowest))
        self._set_exponent(self._clamped(math.floor(octave + ROUNDING)))

    def _clamped(self, exponent: int) -> int:
        return min(max(exponent, self._lowest), self._highest)

    def _set_exponent(self, exponent: int) -> None:
        self._exponent = exponent
        self.scale = 2.0**exponent


class AmaxGradScaler(StrategyGradScaler):
    """Base of the strategies that use the largest gradient: x = log2(target / amax) and its mean.

    Args:
        target: target of the largest scaled gradient, at most 65504.
        ema_decay: factor in [0, 1) by which a step's weight in the mean decreases with each later step.
        **common: see `StrategyGradScaler`.
    """

    STATE: ClassVar[Mapping[str, float | None]] = {"mean": None, "weight": 0.0}
    needs_amax = True

    _mean: float | None
    _weight: float  # sum of the weights in the mean, 1 − decay^n, for bias correction

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
        else:  # update the corrected mean itself, so that equal values do not change it
            self._mean += (1.0 - self.ema_decay) / self._weight * (octave - self._mean)
        self._gather_octave(octave, statistics.loss_scale)

    @abstractmethod
    def _gather_octave(self, octave: float, loss_scale: float) -> None:
        """Collect x of a clean step whose gradients were multiplied by `loss_scale`."""

    def _level(self) -> float | None:
        return self._mean


class StrategySettings(GradScalerSettings):
    """Settings that all strategies based on gradient statistics share."""

    initial_scale: Scale = Field(default=2.0**15, description="the first S; rounded down to a power of two")
    min_scale: Scale = Field(default=1.0, description="S never falls below it")
    max_scale: Scale = Field(default=2.0**32, description="S never grows above it")
    growth_interval: Count = Field(
        default=100,
        description="clean steps in a row after an overflow before S may return to the value that overflowed",
        json_schema_extra=unit("steps"),
    )
    update_every: Count = Field(
        default=1,
        description="interval between changes of S, except that an overflow lowers it at once",
        json_schema_extra=unit("clean steps"),
    )
    sample: Annotated[PositiveNumber, Field(le=1)] = Field(
        default=1.0, description="fraction of the parameters or layers that the statistics are taken from"
    )

    def _check(self) -> None:
        check_initial_scale(self, self.initial_scale, self.min_scale, self.max_scale)


class AmaxSettings(StrategySettings):
    """Settings of the strategies based on the largest gradient."""

    target: PositiveNumber = Field(
        default=TARGET, description="value near which S keeps the largest scaled gradient; at most 65504"
    )
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, description="decay of the moving average of log2(target / largest gradient)"
    )


def _state_value(name: str, value: Any, first: float | None) -> float | None:
    """Check a saved value and convert it to Python; `first`, the initial value, determines its type."""
    value = plain_number(value)
    if isinstance(first, bool):
        is_valid, rule = isinstance(value, bool), "true or false"
    elif isinstance(first, int):
        is_valid, rule = is_whole(value) and value >= 0, "a whole number ≥ 0"
    elif name == "weight":
        is_valid, rule = is_finite_number(value) and 0 <= value <= 1, "in [0, 1]"
    elif first is None and value is None:
        return None
    elif name in WHOLE_OCTAVES:
        is_valid, rule = is_whole(value) and abs(value) <= MOST_OCTAVES, "a whole number of octaves, or null"
    elif first == 0.0:  # a sum, which has no bound
        is_valid, rule = is_finite_number(value), "a finite number"
    else:
        is_valid, rule = is_finite_number(value) and abs(value) <= MOST_OCTAVES, "a finite number of octaves"
    if not is_valid:
        raise damaged(name, value, rule)
    is_counted = isinstance(first, int) or name in WHOLE_OCTAVES
    return value if isinstance(value, bool) else int(value) if is_counted else float(value)
