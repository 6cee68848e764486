"""Loss scales: what every scaler offers, the constant one, and the dynamic one in four libraries' versions.

The loss is multiplied by S before backward, so that small half-precision gradients survive, and the fp32
gradients are divided by it afterwards. A dynamic scaler lowers S after overflows and raises it after a quiet
stretch; `scale_rules` says how, `scaler_state` reads saved scalers, and `scale_strategies` holds scalers
that look at the gradients instead of waiting for an overflow. Unlike the originals, S always stays between
`min_scale` and `max_scale` and a loaded state is made to fit. Everything here is plain Python: no tensors,
so settings can be checked without importing torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalowbit.errors import unknown_name
from megalowbit.optim.loss_scale.rules import (
    MODES,
    RULES,
    SCALE_RULE,
    Mode,
    RuleArguments,
    ScaleState,
    as_float32,
    check,
    is_count,
    is_positive,
    is_scale,
)
from megalowbit.optim.loss_scale.state import (
    STATE_KEYS,
    check_is_mapping,
    fitted_scale,
    read_saved_scaler,
    warn_of_other_arguments,
)


@dataclass(frozen=True, kw_only=True)
class GradientStatistics:
    """What a strategy may look at after one optimizer step; the same on all ranks.

    Attributes:
        loss_scale: S that the step's gradients were multiplied by.
        amax: largest |gradient| as backward made it in half precision, over micro-batches and ranks, divided
            by `loss_scale`; None where it was not gathered.
        norm_ratio: norm of sampled weight gradients in fp32 ÷ norm of the same in half precision, both
            without the scale; None on steps without a probe.
        flushed_fraction: share of the probed elements, not zero in fp32, that are zero in half precision.
    """

    loss_scale: float
    amax: float | None = None
    norm_ratio: float | None = None
    flushed_fraction: float | None = None


class GradScaler(ABC):
    """A loss scale S and the rule by which it changes.

    Attributes:
        scale: S of the coming step.
        needs_amax: whether `update` looks at `GradientStatistics.amax`, which is gathered only then.
        probes: whether `wants_probe` is ever true.
        sample: share, in (0, 1], of the parameters or layers that the statistics are taken from.
    """

    needs_amax: bool = False
    probes: bool = False
    sample: float = 1.0

    def __init__(self, scale: float) -> None:
        check("scale", scale, is_scale(scale), _scale_rule(scale))
        self.scale = float(scale)

    @property
    def inv_scale(self) -> float:
        """1/S, by which gradients are multiplied; exact where S is a power of two."""
        return 1.0 / self.scale

    @property
    def wants_probe(self) -> bool:
        """Whether the norms of the coming step should be probed."""
        return False

    @abstractmethod
    def update(self, found_inf: bool, statistics: GradientStatistics | None = None) -> float:
        """Adapt S after one optimizer step.

        Args:
            found_inf: whether any gradient of the step was infinite or NaN, on any rank.
            statistics: of the step's gradients; None where nothing was gathered.

        Returns:
            The S of the coming step.
        """

    @abstractmethod
    def back_off(self) -> bool:
        """Lower S at once, without regard to hysteresis, so that an overflowed step can be tried again.

        Returns:
            False if S cannot be lowered: it is constant, or at its floor.
        """

    def restart_growth(self) -> None:  # noqa: B027  # right for a scale that does not wait to grow
        """Begin to count clean steps anew, S unchanged: gradients overflowed, but S was not to blame."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What has to be saved so that the next `update` gives the same S."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, of this or another library's scaler: see `scaler_state`.

        Raises:
            UserError: as `check_state_dict` says; nothing has been changed then.
        """

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """See whether `load_state_dict` takes a state; changes and logs nothing.

        Raises:
            UserError: it is no state of a scaler, or damaged; the message names what is wrong.
        """
        check_is_mapping(state)


class ConstantGradScaler(GradScaler):
    """S never changes; a saved dynamic state is ignored."""

    def update(self, found_inf: bool, statistics: GradientStatistics | None = None) -> float:  # noqa: ARG002
        return self.scale

    def back_off(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state_dict(state)


class DynamicGradScaler(GradScaler):
    """S falls on overflow and grows after `growth_interval` clean steps in a row.

    The modes, each equal to its original's S step by step on any sequence, as long as S stays in its bounds:

    * `megatron`: hysteresis is refilled only on growth, so that after a first backoff every further overflow
      lowers S at once. S and both factors are float32. Bounds unless given: 1 and 2^32.
    * `deepspeed`: `DynamicLossScaler`, which grows one clean step later; with `hysteresis=1` also the FP16
      optimizers, which have a rule of their own. Give `backoff_factor = 1 / growth_factor`, its one factor.
      Bounds unless given: 1 and 2^127.
    * `torch`: `torch.amp.GradScaler`; `hysteresis` plays no part. Bounds unless given: what float32 holds.
    * `clean_step`: Apex's `update_scale_hysteresis`; every clean step refills hysteresis. Bounds as torch's.

    Args:
        initial_scale: first S.
        min_scale: S never falls below it; None: as the mode says.
        growth_factor: factor > 1 of a growth.
        backoff_factor: factor in (0, 1) of a backoff.
        growth_interval: clean steps before a growth.
        hysteresis: overflows before the first backoff after a growth.
        mode: whose rule to follow.
        max_scale: S never grows above it; None: as the mode says.
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
        if rule.stored is as_float32:  # S would stay what it was, or move only here and there
            held = f"a number that float32 tells from 1, as mode {mode!r} rounds S to it"
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
                f'left out with mode {mode!r}: it is of "deepspeed"',
            )
        super().__init__(rule.stored(initial_scale))
        self.mode = mode
        self.min_scale, self.max_scale = rule.stored(min_scale), rule.stored(max_scale)
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._rule = rule
        self._arguments = RuleArguments(
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive_hysteresis,
            raise_at_min_scale=raise_at_min_scale,
        )
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis

    def update(self, found_inf: bool, statistics: GradientStatistics | None = None) -> float:  # noqa: ARG002
        self._set(self._rule.after(self._state(), bool(found_inf), self._arguments))
        return self.scale

    def back_off(self) -> bool:
        lowered = self._rule.lowered(self.scale, self._arguments)
        if lowered >= self.scale:
            return False
        # as after any backoff: growth starts anew, and hysteresis is used up
        self._set(ScaleState(lowered, 0, min(self._hysteresis_tracker, 1)))
        return True

    def restart_growth(self) -> None:
        self._growth_tracker = 0

    def state_dict(self) -> dict[str, Any]:
        """`scale`, `growth_tracker` and `hysteresis_tracker`, as Megatron names them."""
        return dict(zip(STATE_KEYS, self._state(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of any scaler that `scaler_state` reads, made to fit these settings.

        A scale outside `[min_scale, max_scale]` is clamped with a warning (below the minimum the next backoff
        would raise it). Values may be tensors of one element, as Megatron saves them.

        Raises:
            UserError: a key is missing, or a value no finite number; nothing has been changed then.
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


def check_scale_bounds(initial_scale: float, min_scale: float, max_scale: float) -> None:
    """Refuse bounds that float32 does not hold, and a first S outside them.

    Raises:
        UserError: names the argument.
    """
    named = {"initial_scale": initial_scale, "min_scale": min_scale, "max_scale": max_scale}
    for name, value in named.items():
        check(name, value, is_scale(value), _scale_rule(value))
    check("initial_scale", initial_scale, min_scale <= initial_scale, f"≥ min_scale ({min_scale})")
    check("initial_scale", initial_scale, initial_scale <= max_scale, f"≤ max_scale ({max_scale})")


def _scale_rule(value: object) -> str:
    return SCALE_RULE if is_positive(value) else "a finite number > 0"


def _check_factors(
    growth_factor: float, backoff_factor: float, growth_interval: int, hysteresis: int
) -> None:
    is_growth = is_positive(growth_factor) and growth_factor > 1
    is_backoff = is_positive(backoff_factor) and backoff_factor < 1
    check("growth_factor", growth_factor, is_growth, "finite and > 1")
    check("backoff_factor", backoff_factor, is_backoff, "in (0, 1)")
    check("growth_interval", growth_interval, is_count(growth_interval), "a whole number > 0")
    check("hysteresis", hysteresis, is_count(hysteresis), "a whole number > 0")
