"""`"grad_scaler"` of the configuration: which loss scaler, with which arguments.

One table leads from a type to its class; the arguments of a type and their defaults are those of the class's
constructor. A new strategy is its class, a line in the table, and a field here for each argument that no
other type has. An argument of another type or mode is refused rather than ignored. Everything is plain
Python, so that a configuration is checked without importing torch.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.base import ConstantGradScaler, DynamicGradScaler, GradScaler
from megalowbit.optim.loss_scale.rules import RULES, SCALE_RULE, Mode, is_scale
from megalowbit.optim.loss_scale.strategies import (
    ControllerGradScaler,
    MaxNormGradScaler,
    MaxValueGradScaler,
    NormRatioGradScaler,
)
from megalowbit.values import SettingsModel

Precision = Literal["fp16", "bf16", "fp32"]
ScalerType = Literal["dynamic", "constant", "none", "max_value", "norm_ratio", "max_norm", "controller"]
SCALERS: dict[str, type[GradScaler]] = {
    "dynamic": DynamicGradScaler,
    "constant": ConstantGradScaler,
    "max_value": MaxValueGradScaler,
    "norm_ratio": NormRatioGradScaler,
    "max_norm": MaxNormGradScaler,
    "controller": ControllerGradScaler,
}
# arguments of `dynamic` that only some of its modes look at
MODES_OF_ARGUMENT: dict[str, tuple[Mode, ...]] = {
    "hysteresis": ("megatron", "deepspeed", "clean_step"),
    "consecutive_hysteresis": ("deepspeed",),
    "raise_at_min_scale": ("deepspeed",),
}

PositiveNumber = Annotated[float, Field(gt=0)]


def _held_by_float32(value: float) -> float:
    if not is_scale(value):
        raise ValueError(f"it must be {SCALE_RULE}")
    return value


Scale = Annotated[PositiveNumber, AfterValidator(_held_by_float32)]
NumberFromZero = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


def scaler_arguments(scaler: type[GradScaler]) -> dict[str, Any]:
    """Names and defaults of all arguments of a scaler's constructor, its bases' (`**common`) included."""
    arguments: dict[str, Any] = {}
    for base in scaler.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        arguments = {parameter.name: parameter.default for parameter in named} | arguments
        if len(named) == len(parameters):
            break
    return arguments


class GradScalerSettings(SettingsModel):
    """`"grad_scaler"` of the configuration; see the classes of `SCALERS` for the arguments.

    `type` left out means: `dynamic` with fp16, `none` with bf16 and fp32. An argument left out, or null, has
    the default of the type's class.
    """

    type: ScalerType | None = None
    mode: Mode | None = None
    scale: Scale | None = None
    min_scale: Scale | None = None
    max_scale: Scale | None = None
    # after the bounds, with which it is compared also where it is left out
    initial_scale: Scale | None = Field(default=None, validate_default=True)
    growth_factor: Annotated[PositiveNumber, Field(gt=1)] | None = None
    backoff_factor: Annotated[PositiveNumber, Field(lt=1)] | None = None
    growth_interval: Count | None = None
    hysteresis: Count | None = None
    consecutive_hysteresis: bool | None = None
    raise_at_min_scale: bool | None = None
    update_every: Count | None = None
    sample: Annotated[PositiveNumber, Field(le=1)] | None = None
    target: PositiveNumber | None = None
    ema_decay: Annotated[NumberFromZero, Field(lt=1)] | None = None
    epsilon: Annotated[PositiveNumber, Field(lt=1)] | None = None
    probe_every: Count | None = None
    gain: Annotated[PositiveNumber, Field(le=0.5)] | None = None
    clip: PositiveNumber | None = None
    dead_band: NumberFromZero | None = None

    @field_validator("initial_scale")
    @classmethod
    def _within_its_bounds(cls, value: float | None, info: ValidationInfo) -> float | None:
        named = {"type", "mode", "min_scale", "max_scale"}
        known = _defaults(info.data.get("type"), info.data.get("mode"))
        if "initial_scale" not in known or not named <= info.data.keys():
            return value  # the type has none, or something else is wrong already
        known |= {key: info.data[key] for key in named if info.data[key] is not None}
        low, high = known["min_scale"], known["max_scale"]
        first = known["initial_scale"] if value is None else value
        if not low <= first <= high:
            default = f"; the default is {first:g}" if value is None else ""
            raise ValueError(f"it must be from min_scale ({low:g}) to max_scale ({high:g}){default}")
        return value

    @model_validator(mode="after")
    def _arguments_belong_to_the_type(self) -> GradScalerSettings:
        own = scaler_arguments(SCALERS[self.type or "dynamic"]) if self.type != "none" else {}
        if "scale" in self._given() and "scale" not in own:
            raise ValueError(f'"scale" belongs to type "constant", not {self.type!r}: use "initial_scale"')
        foreign = sorted(self._given().keys() - own.keys())
        if foreign:
            where = "; ".join(f"{name} belongs to type {_owners(name)}" for name in foreign)
            raise ValueError(f"{where}, not {self.type or 'dynamic'!r}")
        if self.type == "constant" and self.scale is None:
            raise ValueError('type "constant" needs "scale", for example {"type": "constant", "scale": 1024}')
        mode = self.mode or "megatron"
        for name, modes in MODES_OF_ARGUMENT.items():
            if name in self._given() and mode not in modes:
                raise ValueError(f"{name} belongs to mode {_listed(modes)}, not {mode!r}")
        if self.type != "none":
            SCALERS[self.type or "dynamic"](**self.arguments())  # refuses what does not go together
        return self

    @model_serializer
    def _only_what_matters(self) -> dict[str, Any]:
        return {"type": self.type, **self.arguments()}

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the type's class, those left out included; none for type `none`."""
        return _defaults(self.type, self.mode) | self._given()

    def _given(self) -> dict[str, Any]:
        names = self.model_fields_set - {"type"}
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


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
    return SCALERS[kind](**settings.arguments())


def _defaults(kind: str | None, mode: Mode | None) -> dict[str, Any]:
    """Defaults of a type's arguments; without those that have none, or that the mode does not look at."""
    if kind == "none":
        return {}
    defaults = scaler_arguments(SCALERS[kind or "dynamic"])
    if "mode" in defaults:
        mode = mode or defaults["mode"]
        bounds = {"min_scale": RULES[mode].min_scale, "max_scale": RULES[mode].max_scale}
        unused = {name for name, modes in MODES_OF_ARGUMENT.items() if mode not in modes}
        defaults = {key: value for key, value in defaults.items() if key not in unused} | bounds
        defaults["mode"] = mode
    return {key: value for key, value in defaults.items() if value is not inspect.Parameter.empty}


def _owners(name: str) -> str:
    return _listed(kind for kind, scaler in SCALERS.items() if name in scaler_arguments(scaler))


def _listed(names: Any) -> str:
    return " or ".join(f'"{name}"' for name in names)
