"""The interface of all loss scales, the base of their settings, and checks of their numbers.

The loss is multiplied by S before backward, to keep small half-precision gradients from becoming zero.
Afterwards the fp32 gradients are divided by S. A strategy is one file in this folder, with its class and
settings, listed in `registry`. S always stays between `min_scale` and `max_scale`; a loaded state is clamped
to them. Everything is plain Python without tensors, so settings are checked without importing torch.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, ValidationError, model_serializer, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from megalowbit.errors import UserError, shown
from megalowbit.json_text import is_finite_number
from megalowbit.optim.loss_scale.state import check_is_mapping
from megalowbit.values import SettingsModel

LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
SMALLEST_SCALE = 2.0**-126  # the smallest number with a finite reciprocal in float32
SCALE_RULE = "a number that fits in float32, and its inverse too: from 2**-126 to 3.4e38"


def as_float32(value: float) -> float:
    """`value` rounded to float32; infinite if it is too large."""
    return ctypes.c_float(value).value


def is_positive(value: object) -> bool:
    """Whether `value` is a finite number > 0."""
    return is_finite_number(value) and value > 0  # type: ignore[operator]


def is_scale(value: object) -> bool:
    """Whether `value` can be a loss scale: losses and gradients are multiplied by S and 1/S in float32."""
    # rounded to float32 first: 3.4028235e38 as text is slightly above the largest
    return is_positive(value) and SMALLEST_SCALE <= as_float32(float(value)) <= LARGEST_FLOAT32  # type: ignore[arg-type]


def check(name: str, value: object, is_valid: bool, rule: str) -> None:
    """Raise `UserError` "`name` must be `rule`, not `value`" unless `is_valid`."""
    if not is_valid:
        raise UserError(f"{name} must be {rule}, not {shown(value)}")


def _held_by_float32(value: float) -> float:
    if not is_scale(value):
        raise ValueError(f"it must be {SCALE_RULE}")
    return value


PositiveNumber = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Scale = Annotated[PositiveNumber, AfterValidator(_held_by_float32)]


@dataclass(frozen=True, kw_only=True)
class GradientStatistics:
    """Statistics of one optimizer step for a strategy; the same on all ranks.

    Attributes:
        loss_scale: S by which the step's gradients were multiplied.
        amax: largest |gradient| in half precision, before accumulation, over micro-batches and ranks, divided
            by `loss_scale`; None if not collected.
        norm_ratio: norm of sampled weight gradients in fp32 ÷ norm of the same in half precision, both
            without the scale; None on steps without a probe.
        flushed_fraction: share of the probed elements that are zero in half precision but not in fp32.
    """

    loss_scale: float
    amax: float | None = None
    norm_ratio: float | None = None
    flushed_fraction: float | None = None


class GradScaler(ABC):
    """A loss scale S and the rule by which it changes.

    Attributes:
        scale: S of the coming step.
        needs_amax: whether `update` uses `GradientStatistics.amax`, which is otherwise not collected.
        probes: whether `wants_probe` is ever true.
        sample: share, in (0, 1], of the parameters or layers to take statistics from.
    """

    needs_amax: bool = False
    probes: bool = False
    sample: float = 1.0

    def __init__(self, scale: float) -> None:
        check("scale", scale, is_scale(scale), _scale_rule(scale))
        self.scale = float(scale)

    @property
    def inv_scale(self) -> float:
        """1/S, by which gradients are multiplied; exact if S is a power of two."""
        return 1.0 / self.scale

    @property
    def wants_probe(self) -> bool:
        """Whether to probe the norms of the coming step."""
        return False

    @abstractmethod
    def update(self, found_inf: bool, statistics: GradientStatistics | None = None) -> float:
        """Adapt S after one optimizer step.

        Args:
            found_inf: whether any gradient of the step was infinite or NaN on any rank.
            statistics: of the step's gradients; None if nothing was collected.

        Returns:
            S of the coming step.
        """

    @abstractmethod
    def back_off(self) -> bool:
        """Lower S immediately, regardless of hysteresis, to repeat an overflowed step.

        Returns:
            False if S cannot be lowered: it is constant, or at its minimum.
        """

    def restart_growth(self) -> None:  # noqa: B027  # correct for a scale that does not wait to grow
        """Restart the count of clean steps, S unchanged: gradients overflowed, but not because of S."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state that determines S after the next `update`."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of this or another library's scaler, see `state`.

        Raises:
            UserError: see `check_state_dict`; then nothing has changed.
        """

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check whether `load_state_dict` accepts a state; changes and logs nothing.

        Raises:
            UserError: it is not a scaler's state, or damaged; the message names the problem.
        """
        check_is_mapping(state)


MegatronGradScaler = GradScaler  # Megatron-LM's name


class GradScalerSettings(SettingsModel):
    """Base of the settings of all grad scalers; each strategy has a subclass with another `type`.

    The other fields are the arguments of `SCALER`, with the same defaults.
    """

    SCALER: ClassVar[type[GradScaler]]

    type: str

    @model_validator(mode="after")
    def _can_be_combined(self) -> GradScalerSettings:
        self._check()
        self.build()  # the scaler's constructor rejects the other invalid combinations
        return self

    @model_serializer
    def _arguments_of_the_strategy(self) -> dict[str, Any]:
        return {"type": self.type, **self.arguments()}

    def build(self) -> GradScaler | None:
        """The scaler that the settings describe, or None."""
        return self.SCALER(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `SCALER`."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "type"}

    def _check(self) -> None:
        """Reject values that cannot be combined, with a message in terms of the configuration's keys.

        Raises:
            ValueError: a `ValidationError` if a single key is at fault.
        """


def check_initial_scale(settings: GradScalerSettings, first: float, low: float, high: float) -> None:
    """Reject an `initial_scale` outside its bounds.

    Raises:
        ValidationError: of the key `initial_scale`.
    """
    if low <= first <= high:
        return
    is_given = "initial_scale" in settings.model_fields_set
    default = "" if is_given else f"; the default is {first:g}"
    reason = f"it must be from min_scale ({low:g}) to max_scale ({high:g}){default}"
    error = InitErrorDetails(
        type=PydanticCustomError("value_error", "{reason}", {"reason": reason}),
        loc=("initial_scale",),
        input=first if is_given else None,
    )
    raise ValidationError.from_exception_data("grad_scaler", [error])


def check_scale_bounds(initial_scale: float, min_scale: float, max_scale: float) -> None:
    """Reject bounds that do not fit in float32, and an initial S outside the bounds.

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
