"""A loss scale that never changes, for gradients of known size and for comparisons with other runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from megalowbit.optim.loss_scale.base import GradientStatistics, GradScaler, GradScalerSettings, Scale


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


class ConstantSettings(GradScalerSettings):
    """The scale never changes."""

    SCALER = ConstantGradScaler

    type: Literal["constant"] = "constant"
    scale: Scale = Field(description="the loss scale S, such as 1024")

    @model_validator(mode="before")
    @classmethod
    def _has_a_scale(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "scale" not in values:
            raise ValueError('type "constant" needs "scale", for example {"type": "constant", "scale": 1024}')
        return values
