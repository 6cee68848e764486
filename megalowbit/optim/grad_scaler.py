"""Loss scales: constant, or dynamic with the growth, backoff and hysteresis of Megatron.

The loss is multiplied by S before backward, so that small half-precision gradients survive, and the fp32
gradients are divided by it afterwards. A dynamic scaler lowers S after overflows and raises it after a quiet
stretch. The order of operations is that of Megatron-Core's `DynamicGradScaler`: hysteresis is refilled only
on growth, so after the first backoff every further overflow lowers S at once. Unlike the original, S is
capped at `max_scale` (uncapped it reaches infinity and never comes back) and a loaded state is made to fit.
Everything here is plain Python: no tensors, so settings can be checked without importing torch.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from megalowbit.errors import UserError

logger = logging.getLogger(__name__)

Precision = Literal["fp16", "bf16", "fp32"]
# strict: `true` and "8" are not numbers
PositiveNumber = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
STATE_KEYS = ("scale", "growth_tracker", "hysteresis_tracker")


class GradScaler(ABC):
    """A loss scale S and the rule by which it changes."""

    def __init__(self, scale: float) -> None:
        _check("scale", scale, _is_positive(scale), "a finite number > 0")
        self.scale = float(scale)

    @property
    def inv_scale(self) -> float:
        """1/S, by which gradients are multiplied; exact where S is a power of two."""
        return 1.0 / self.scale

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """Adapt S after one optimizer step.

        Args:
            found_inf: whether any gradient of the step was infinite or NaN, on any rank.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, float | int]:
        """What has to be saved so that the next `update` gives the same S."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


class ConstantGradScaler(GradScaler):
    """S never changes; a saved dynamic state is ignored."""

    def update(self, found_inf: bool) -> None:
        pass

    def state_dict(self) -> dict[str, float | int]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class DynamicGradScaler(GradScaler):
    """S falls on overflow and grows after `growth_interval` clean steps in a row.

    Args:
        initial_scale: first S.
        min_scale: S never falls below it.
        growth_factor: factor > 1 of a growth.
        backoff_factor: factor in (0, 1) of a backoff.
        growth_interval: clean steps before a growth.
        hysteresis: overflows before the first backoff after a growth.
        max_scale: S never grows above it.

    Raises:
        UserError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        *,
        max_scale: float = 2.0**32,
    ) -> None:
        _check("initial_scale", initial_scale, _is_positive(initial_scale), "a finite number > 0")
        _check("min_scale", min_scale, _is_positive(min_scale), "a finite number > 0")
        _check("max_scale", max_scale, _is_positive(max_scale), "a finite number > 0")
        _check("initial_scale", initial_scale, min_scale <= initial_scale, f"≥ min_scale ({min_scale})")
        _check("initial_scale", initial_scale, initial_scale <= max_scale, f"≤ max_scale ({max_scale})")
        _check(
            "growth_factor",
            growth_factor,
            _is_positive(growth_factor) and growth_factor > 1,
            "finite and > 1",
        )
        _check(
            "backoff_factor", backoff_factor, _is_positive(backoff_factor) and backoff_factor < 1, "in (0, 1)"
        )
        _check("growth_interval", growth_interval, _is_count(growth_interval), "a whole number > 0")
        _check("hysteresis", hysteresis, _is_count(hysteresis), "a whole number > 0")
        super().__init__(initial_scale)
        self.min_scale = float(min_scale)
        self.max_scale = float(max_scale)
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self._growth_tracker += 1
        # ≥ and not ==: a tracker loaded into a shorter interval would otherwise never grow again
        if self._growth_tracker >= self.growth_interval:
            self._growth_tracker = 0
            self._hysteresis_tracker = self.hysteresis
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, float | int]:
        """`scale`, `growth_tracker` and `hysteresis_tracker`, as Megatron names them."""
        values = (self.scale, self._growth_tracker, self._hysteresis_tracker)
        return dict(zip(STATE_KEYS, values, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, made to fit these settings.

        A scale outside `[min_scale, max_scale]` is clamped with a warning (below the minimum the next backoff
        would raise it). Values may be tensors of one element, as Megatron saves them.

        Raises:
            UserError: a key is missing, or the scale is not a finite number > 0.
        """
        missing = [key for key in STATE_KEYS if key not in state]
        if missing:
            raise UserError(
                f"grad scaler state lacks {', '.join(missing)}: found only {sorted(state) or 'nothing'}"
            )
        scale = float(state["scale"])
        _check("scale of the loaded grad scaler state", scale, _is_positive(scale), "a finite number > 0")
        self.scale = min(max(scale, self.min_scale), self.max_scale)
        if self.scale != scale:
            logger.warning(
                "loaded loss scale %g lies outside [%g, %g]: continuing with %g",
                scale, self.min_scale, self.max_scale, self.scale,
            )  # fmt: skip
        self._growth_tracker = max(int(state["growth_tracker"]), 0)
        self._hysteresis_tracker = min(int(state["hysteresis_tracker"]), self.hysteresis)


class GradScalerSettings(BaseModel):
    """`"grad_scaler"` of the configuration; see `DynamicGradScaler` for the arguments.

    `type` left out means: `dynamic` with fp16, `none` with bf16 and fp32.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["dynamic", "constant", "none"] | None = None
    scale: PositiveNumber | None = None
    min_scale: PositiveNumber = 1.0
    max_scale: PositiveNumber = 2.0**32
    # after the bounds, with which it is compared also where it is left out
    initial_scale: PositiveNumber = Field(default=2.0**32, validate_default=True)
    growth_factor: Annotated[PositiveNumber, Field(gt=1)] = 2.0
    backoff_factor: Annotated[PositiveNumber, Field(lt=1)] = 0.5
    growth_interval: Count = 1000
    hysteresis: Count = 2

    @field_validator("initial_scale")
    @classmethod
    def _within_its_bounds(cls, value: float, info: ValidationInfo) -> float:
        low, high = info.data.get("min_scale", value), info.data.get("max_scale", value)
        if not low <= value <= high:
            raise ValueError(f"it must be from min_scale ({low:g}) to max_scale ({high:g})")
        return value

    @model_validator(mode="after")
    def _only_arguments_of_the_type(self) -> GradScalerSettings:
        given = self.model_fields_set - {"type"}
        dynamic = given - {"scale"}
        if self.type == "constant":
            if self.scale is None:
                raise ValueError(
                    'type "constant" needs "scale", for example {"type": "constant", "scale": 1024}'
                )
        elif "scale" in given:
            raise ValueError(f'"scale" belongs to type "constant", not {self.type!r}: use "initial_scale"')
        if self.type in {"constant", "none"} and dynamic:
            raise ValueError(f'{", ".join(sorted(dynamic))} belong to type "dynamic", not {self.type!r}')
        return self

    @model_serializer
    def _only_what_matters(self) -> dict[str, Any]:
        if self.type in {"dynamic", None}:
            return {"type": self.type, **self.dynamic_arguments()}
        return {"type": self.type} | ({"scale": self.scale} if self.type == "constant" else {})

    def dynamic_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `DynamicGradScaler`."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if name not in {"type", "scale"}
        }


def default_scaler_type(precision: Precision) -> Literal["dynamic", "none"]:
    """The `type` used where the settings name none."""
    return "dynamic" if precision == "fp16" else "none"


def build_grad_scaler(settings: GradScalerSettings, precision: Precision) -> GradScaler | None:
    """Make the scaler the settings describe.

    Raises:
        UserError: fp16 without a scaler, or fp32 with one.
    """
    kind = settings.type or default_scaler_type(precision)
    if kind == "none":
        if precision == "fp16":
            raise UserError(
                'fp16 expects a grad scaler. Set grad_scaler.type to "dynamic" or "constant", not "none"'
            )
        return None
    if precision == "fp32":
        raise UserError(f'fp32 uses no grad scaler: set grad_scaler.type to "none", not {kind!r}')
    if settings.scale is not None:
        return ConstantGradScaler(settings.scale)
    return DynamicGradScaler(**settings.dynamic_arguments())


def _is_positive(value: object) -> bool:
    # compared, because math.isfinite raises on integers beyond the largest float
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check(name: str, value: object, is_valid: bool, rule: str) -> None:
    if not is_valid:
        raise UserError(f"{name} must be {rule}, not {value!r}")
