"""How a dynamic loss scale changes after a step, with the arithmetic of each library's original rule.

Four libraries differ in two points: which overflow lowers S, and which clean step raises it. Each rule is a
pure function of (S, two counters) and gives the same bits as its original, also with factors other than 2.
That decides the arithmetic: Megatron keeps S and its factors in float32, torch and Apex keep S in float32 but
multiply in float64, DeepSpeed uses Python floats and divides. Errors of the originals at the limits are fixed
for all rules: S never becomes infinite or zero, and a counter loaded into a shorter interval still grows.

The counters are the clean steps that count towards the next growth, and the overflows left until one lowers S
(1 or less: the next one does).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, get_args

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.base import LARGEST_FLOAT32, SMALLEST_SCALE, as_float32

Mode = Literal["megatron", "deepspeed", "torch", "clean_step"]
MODES: tuple[Mode, ...] = get_args(Mode)


class RuleArguments(Protocol):
    """The attributes of `DynamicGradScaler` that a rule uses."""

    min_scale: float
    max_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    consecutive_hysteresis: bool
    raise_at_min_scale: bool


class ScaleState(NamedTuple):
    """S and its counters."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """The rule of one library.

    Attributes:
        after: the state after a step with (True) or without an overflow.
        lowered: S after a backoff.
        stored: rounds a number to the type in which the original stores it: float32 or float64.
        min_scale: default minimum.
        max_scale: default maximum.
    """

    after: Callable[[ScaleState, bool, RuleArguments], ScaleState]
    lowered: Callable[[float, RuleArguments], float]
    stored: Callable[[float], float]
    min_scale: float
    max_scale: float


def _megatron_lowered(scale: float, arguments: RuleArguments) -> float:
    return max(as_float32(scale * as_float32(arguments.backoff_factor)), arguments.min_scale)


def _after_megatron(state: ScaleState, found_inf: bool, arguments: RuleArguments) -> ScaleState:
    scale, clean, left = state
    if found_inf:
        # refilled on growth only: after the first backoff every further overflow backs off
        lowered = _megatron_lowered(scale, arguments) if left <= 1 else scale
        return ScaleState(lowered, 0, left - 1)
    if clean + 1 < arguments.growth_interval:
        return ScaleState(scale, clean + 1, left)
    grown = as_float32(scale * as_float32(arguments.growth_factor))
    return ScaleState(min(grown, arguments.max_scale), 0, arguments.hysteresis)


def _float64_lowered(scale: float, arguments: RuleArguments) -> float:
    return max(as_float32(scale * arguments.backoff_factor), arguments.min_scale)


def _after_clean(state: ScaleState, arguments: RuleArguments) -> ScaleState:
    if state.growth_tracker + 1 < arguments.growth_interval:
        return ScaleState(state.scale, state.growth_tracker + 1, arguments.hysteresis)
    grown = as_float32(state.scale * arguments.growth_factor)
    scale = min(grown, arguments.max_scale) if math.isfinite(grown) else state.scale
    return ScaleState(scale, 0, arguments.hysteresis)


def _after_torch(state: ScaleState, found_inf: bool, arguments: RuleArguments) -> ScaleState:
    if not found_inf:
        return _after_clean(state, arguments)
    return ScaleState(_float64_lowered(state.scale, arguments), 0, arguments.hysteresis)


def _after_clean_step(state: ScaleState, found_inf: bool, arguments: RuleArguments) -> ScaleState:
    if not found_inf:
        return _after_clean(state, arguments)
    left = state.hysteresis_tracker - 1
    return ScaleState(state.scale if left > 0 else _float64_lowered(state.scale, arguments), 0, left)


def _deepspeed_lowered(scale: float, arguments: RuleArguments) -> float:
    # the original has one factor and divides by it: with 3.0 this differs from multiplying by 1/3
    if arguments.backoff_factor == 1.0 / arguments.growth_factor:
        return max(scale / arguments.growth_factor, arguments.min_scale)
    return max(scale * arguments.backoff_factor, arguments.min_scale)


def _after_deepspeed(state: ScaleState, found_inf: bool, arguments: RuleArguments) -> ScaleState:
    scale, clean, left = state
    if found_inf and left > 1:
        return ScaleState(scale, 0, left - 1)
    if found_inf:
        if arguments.raise_at_min_scale and scale == arguments.min_scale:
            raise UserError(
                f"gradients overflow at the smallest loss scale, min_scale = {scale:g}: lower the learning "
                "rate or min_scale, or set raise_at_min_scale to false to skip such steps without an error"
            )
        return ScaleState(_deepspeed_lowered(scale, arguments), 0, left)
    if arguments.consecutive_hysteresis:
        left = arguments.hysteresis
    # The original does not count the step after the overflow, so the first growth comes one step later than
    # the interval says, but the next ones do not; therefore the counter restarts at 1 after a growth.
    if clean < arguments.growth_interval:
        return ScaleState(scale, clean + 1, left)
    grown = min(scale * arguments.growth_factor, arguments.max_scale)
    return ScaleState(grown, 1, arguments.hysteresis)


_TORCH = ScaleRule(
    after=_after_torch,
    lowered=_float64_lowered,
    stored=as_float32,
    min_scale=SMALLEST_SCALE,
    max_scale=LARGEST_FLOAT32,
)
RULES: dict[Mode, ScaleRule] = {
    "megatron": ScaleRule(
        after=_after_megatron,
        lowered=_megatron_lowered,
        stored=as_float32,
        min_scale=1.0,
        max_scale=2.0**32,
    ),
    "deepspeed": ScaleRule(
        after=_after_deepspeed,
        lowered=_deepspeed_lowered,
        stored=float,
        min_scale=1.0,
        max_scale=2.0**127,
    ),
    "torch": _TORCH,
    "clean_step": replace(_TORCH, after=_after_clean_step),
}
