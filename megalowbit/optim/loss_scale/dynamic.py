"""The dynamic loss scale in the versions of four libraries: S falls on overflow and grows after clean steps.

`rules` defines the rules, and `state` reads the saved scalers of those libraries. Unlike in the originals, S
stays between `min_scale` and `max_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from megalowbit.errors import unknown_name
from megalowbit.optim.loss_scale.base import (
    Count,
    GradientStatistics,
    GradScaler,
    GradScalerSettings,
    PositiveNumber,
    Scale,
    as_float32,
    check,
    check_initial_scale,
    check_scale_bounds,
    is_positive,
)
from megalowbit.optim.loss_scale.rules import MODES, RULES, Mode, ScaleState
from megalowbit.optim.loss_scale.state import (
    STATE_KEYS,
    fitted_scale,
    read_saved_scaler,
    warn_of_other_arguments,
)
from megalowbit.values import is_count, unit

# arguments that only some modes use
MODES_OF_ARGUMENT: dict[str, tuple[Mode, ...]] = {
    "hysteresis": ("megatron", "deepspeed", "clean_step"),
    "consecutive_hysteresis": ("deepspeed",),
    "raise_at_min_scale": ("deepspeed",),
}


class DynamicGradScaler(GradScaler):
    """S falls on overflow and grows after `growth_interval` clean steps in a row.

    Each mode gives the same S as its original, step by step, on any sequence, as long as S stays within its
    bounds:

    * `megatron`: hysteresis is refilled only on growth. After a first backoff, every further overflow
      therefore lowers S immediately. S and both factors are float32. Default bounds: 1 and 2^32.
    * `deepspeed`: `DynamicLossScaler`, which grows one clean step later. With `hysteresis=1` it also matches
      the FP16 optimizers, which have a separate rule. Pass `backoff_factor = 1 / growth_factor`, because the
      original has only one factor. Default bounds: 1 and 2^127.
    * `torch`: `torch.amp.GradScaler`; `hysteresis` has no effect. Default bounds: the range of float32.
    * `clean_step`: Apex's `update_scale_hysteresis`; every clean step refills hysteresis. Bounds as for
      `torch`.

    Args:
        initial_scale: first S.
        min_scale: lower bound of S; None: the mode's.
        growth_factor: factor > 1 of a growth.
        backoff_factor: factor in (0, 1) of a backoff.
        growth_interval: clean steps before a growth.
        hysteresis: overflows before the first backoff after a growth.
        mode: the library whose rule to follow.
        max_scale: upper bound of S; None: the mode's.
        consecutive_hysteresis: a clean step refills hysteresis (only `deepspeed`).
        raise_at_min_scale: an overflow at `min_scale` that would lower S raises UserError (only `deepspeed`).

    Raises:
        UserError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**32,
        min_scale: float | None = None,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        *,
        mode: Mode = "megatron",
        max_scale: float | None = None,
        consecutive_hysteresis: bool = False,
        raise_at_min_scale: bool = False,
    ) -> None:
        if mode not in MODES:
            raise unknown_name("mode of a grad scaler", mode, MODES)
        rule = RULES[mode]
        min_scale = rule.min_scale if min_scale is None else min_scale
        max_scale = rule.max_scale if max_scale is None else max_scale
        check_scale_bounds(initial_scale, min_scale, max_scale)
        _check_factors(growth_factor, backoff_factor, growth_interval, hysteresis)
        if rule.stored is as_float32:  # such a factor would leave S unchanged, or change it only sometimes
            held = f"a number that differs from 1 in float32, to which mode {mode!r} rounds S"
            check("growth_factor", growth_factor, as_float32(growth_factor) > 1, held)
            check("backoff_factor", backoff_factor, as_float32(backoff_factor) < 1, held)
        for name, value in (
            ("consecutive_hysteresis", consecutive_hysteresis),
            ("raise_at_min_scale", raise_at_min_scale),
        ):
            check(name, value, isinstance(value, bool), "True or False")
            check(
                name,
                value,
                mode == "deepspeed" or not value,
                f'left out with mode {mode!r}: it belongs to "deepspeed"',
            )
        super().__init__(rule.stored(initial_scale))
        self.mode = mode
        self.min_scale, self.max_scale = rule.stored(min_scale), rule.stored(max_scale)
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._rule = rule
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_at_min_scale = raise_at_min_scale
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis

    def update(self, found_inf: bool, statistics: GradientStatistics | None = None) -> float:  # noqa: ARG002
        self._set(self._rule.after(self._state(), bool(found_inf), self))
        return self.scale

    def back_off(self) -> bool:
        lowered = self._rule.lowered(self.scale, self)
        if lowered >= self.scale:
            return False
        # as after any backoff: growth restarts, and hysteresis is used up
        self._set(ScaleState(lowered, 0, min(self._hysteresis_tracker, 1)))
        return True

    def restart_growth(self) -> None:
        self._growth_tracker = 0

    def state_dict(self) -> dict[str, Any]:
        """`scale`, `growth_tracker` and `hysteresis_tracker`, with Megatron's names."""
        return dict(zip(STATE_KEYS, self._state(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of any scaler that `state` reads, adapted to these settings.

        A scale outside `[min_scale, max_scale]` is clamped with a warning (below the minimum the next backoff
        would raise it). Values may be tensors of one element, as Megatron saves them.

        Raises:
            UserError: a key is missing, or a value is not a finite number; then nothing has changed.
        """
        saved = read_saved_scaler(state)
        left = self.hysteresis if saved.hysteresis_tracker is None else saved.hysteresis_tracker
        scale = fitted_scale(saved.scale, self.min_scale, self.max_scale)
        used = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis")
        warn_of_other_arguments(saved, {name: getattr(self, name) for name in used})
        self._set(
            ScaleState(self._rule.stored(scale), max(saved.growth_tracker, 0), min(left, self.hysteresis))
        )

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        read_saved_scaler(state)

    def _state(self) -> ScaleState:
        return ScaleState(self.scale, self._growth_tracker, self._hysteresis_tracker)

    def _set(self, state: ScaleState) -> None:
        self.scale, self._growth_tracker, self._hysteresis_tracker = state


class DynamicSettings(GradScalerSettings):
    """The scale falls on overflow and grows after a number of clean steps in a row."""

    SCALER = DynamicGradScaler

    type: Literal["dynamic"] = "dynamic"
    initial_scale: Scale = Field(default=2.0**32, description="the first S")
    min_scale: Scale | None = Field(
        default=None,
        description="S never falls below it. `null`: the mode's bound, 1 except for `torch` and "
        "`clean_step`, which allow what float32 holds",
    )
    growth_factor: Annotated[PositiveNumber, Field(gt=1)] = Field(
        default=2.0, description="factor by which S grows"
    )
    backoff_factor: Annotated[PositiveNumber, Field(lt=1)] = Field(
        default=0.5, description="factor by which S falls"
    )
    growth_interval: Count = Field(
        default=1000, description="clean steps before S grows", json_schema_extra=unit("steps")
    )
    hysteresis: Count = Field(
        default=2,
        description="overflows before the first backoff after a growth",
        json_schema_extra=unit("overflows"),
    )
    mode: Mode = Field(
        default="megatron",
        description="the library whose rule S follows: Megatron's, DeepSpeed's `DynamicLossScaler`, "
        "`torch.amp.GradScaler`, or Apex's `update_scale_hysteresis` (`clean_step`: every clean step refills "
        "hysteresis)",
    )
    max_scale: Scale | None = Field(
        default=None,
        description="S never grows above it. `null`: the mode's bound, 2³² for `megatron`, 2¹²⁷ for "
        "`deepspeed`, what float32 holds for the others",
    )
    consecutive_hysteresis: bool = Field(
        default=False, description="a clean step refills hysteresis; mode `deepspeed` only"
    )
    raise_at_min_scale: bool = Field(
        default=False,
        description="an overflow at `min_scale` that would lower S ends the run with an error; mode "
        "`deepspeed` only",
    )

    def arguments(self) -> dict[str, Any]:
        """The arguments that the mode uses, with the mode's bounds filled in."""
        rule = RULES[self.mode]
        arguments = {
            name: value
            for name, value in super().arguments().items()
            if self.mode in MODES_OF_ARGUMENT.get(name, MODES)
        }
        low = rule.min_scale if self.min_scale is None else self.min_scale
        high = rule.max_scale if self.max_scale is None else self.max_scale
        return arguments | {"min_scale": low, "max_scale": high}

    def _check(self) -> None:
        arguments = self.arguments()
        check_initial_scale(self, self.initial_scale, arguments["min_scale"], arguments["max_scale"])
        for name, modes in MODES_OF_ARGUMENT.items():
            if name in self.model_fields_set and self.mode not in modes:
                known = " or ".join(f'"{mode}"' for mode in modes)
                raise ValueError(f"{name} belongs to mode {known}, not {self.mode!r}")


def _check_factors(
    growth_factor: float, backoff_factor: float, growth_interval: int, hysteresis: int
) -> None:
    is_growth = is_positive(growth_factor) and growth_factor > 1
    is_backoff = is_positive(backoff_factor) and backoff_factor < 1
    check("growth_factor", growth_factor, is_growth, "finite and > 1")
    check("backoff_factor", backoff_factor, is_backoff, "in (0, 1)")
    check("growth_interval", growth_interval, is_count(growth_interval), "a whole number > 0")
    check("hysteresis", hysteresis, is_count(hysteresis), "a whole number > 0")
