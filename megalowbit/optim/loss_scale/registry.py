"""The strategies that a configuration may name under `"grad_scaler"`, and how a scaler is built from it.

A new strategy is a file in this folder with its class and settings, and a line in `Strategy`. An argument of
another strategy is rejected, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Tag

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.base import GradScaler, GradScalerSettings
from megalowbit.optim.loss_scale.constant import ConstantSettings
from megalowbit.optim.loss_scale.controller import ControllerSettings
from megalowbit.optim.loss_scale.dynamic import DynamicSettings
from megalowbit.optim.loss_scale.max_norm import MaxNormSettings
from megalowbit.optim.loss_scale.max_value import MaxValueSettings
from megalowbit.optim.loss_scale.norm_ratio import NormRatioSettings
from megalowbit.values import BY_TYPE, models_by_type

Precision = Literal["fp16", "bf16", "fp32"]


class NoScalerSettings(GradScalerSettings):
    """`{"type": "none"}`: losses and gradients are not scaled."""

    type: Literal["none"] = "none"

    def build(self) -> None:
        """None."""


# in the order in which error messages list them
Strategy = (
    Annotated[DynamicSettings, Tag("dynamic")]
    | Annotated[ConstantSettings, Tag("constant")]
    | Annotated[NoScalerSettings, Tag("none")]
    | Annotated[MaxValueSettings, Tag("max_value")]
    | Annotated[NormRatioSettings, Tag("norm_ratio")]
    | Annotated[MaxNormSettings, Tag("max_norm")]
    | Annotated[ControllerSettings, Tag("controller")]
)
STRATEGIES: dict[str, type[GradScalerSettings]] = models_by_type(Strategy)


def _without_foreign_arguments(values: Any) -> Any:
    """Reject arguments of other strategies; a null argument gets its default."""
    if isinstance(values, GradScalerSettings):
        return values
    if not isinstance(values, Mapping):
        raise ValueError("Input should be a valid dictionary or instance of GradScalerSettings")
    known = {name for strategy in STRATEGIES.values() for name in strategy.model_fields}
    given = {name: value for name, value in values.items() if name not in known or value is not None}
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in STRATEGIES:
        return given
    foreign = sorted((given.keys() & known) - STRATEGIES[kind].model_fields.keys())
    if "scale" in foreign:
        raise ValueError(f'"scale" belongs to type "constant", not {kind!r}: use "initial_scale"')
    if foreign:
        where = "; ".join(f"{name} belongs to type {_owners(name)}" for name in foreign)
        raise ValueError(f"{where}, not {kind!r}")
    return given


def _owners(name: str) -> str:
    return " or ".join(f'"{kind}"' for kind, each in STRATEGIES.items() if name in each.model_fields)


AnyGradScalerSettings = Annotated[Strategy, BY_TYPE, BeforeValidator(_without_foreign_arguments)]


def default_scaler_type(precision: Precision) -> Literal["dynamic", "none"]:
    """The `type` that is used if the settings name none."""
    return "dynamic" if precision == "fp16" else "none"


def build_grad_scaler(settings: GradScalerSettings, precision: Precision) -> GradScaler | None:
    """Build the scaler that the settings describe.

    Raises:
        UserError: fp16 without a scaler, or fp32 with one.
    """
    scaler = settings.build()
    if scaler is None and precision == "fp16":
        raise UserError(
            'fp16 expects a grad scaler. Set grad_scaler.type to "dynamic" or "constant", not "none"'
        )
    if scaler is not None and precision == "fp32":
        raise UserError(f'fp32 uses no grad scaler: set grad_scaler.type to "none", not {settings.type!r}')
    return scaler
