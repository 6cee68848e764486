"""Settings of the section `layer_scaling`, in a separate file that is imported without torch."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, field_validator

from megalowbit.values import SettingsModel, unit

PositiveNumber = Annotated[float, Field(gt=0)]


class LayerScalingSettings(SettingsModel):
    """A separate loss-scale factor, a power of two, for the gradients inside each block. Off by default."""

    enabled: bool = Field(default=False, description="give each block a factor")
    modules: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description="name patterns of the modules that get a factor, such as `*.attn` and `*.mlp`. Empty: "
        "the blocks in the model's longest `ModuleList`",
    )
    target: Annotated[PositiveNumber, Field(le=2.0**15)] = Field(
        default=2.0**11,
        description="the largest stored gradient of a block is kept near this value. The default is four "
        "octaves below fp16's largest power of two, because gradients of activations are not measured",
    )
    # fp32 sums are divided by it
    max_factor: Annotated[PositiveNumber, Field(le=2.0**126)] = Field(
        default=2.0**16, description="largest factor; a power of two"
    )
    smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9,
        description="decay of the moving average of log2 of the block's largest gradient",
    )
    every: Annotated[int, Field(ge=1)] = Field(
        default=1,
        description="interval between changes of a factor. An overflow lowers a factor at once",
        json_schema_extra=unit("applied steps"),
    )

    @field_validator("max_factor")
    @classmethod
    def _is_a_power_of_two(cls, value: float) -> float:
        if math.frexp(value)[0] != 0.5 or value < 1:
            raise ValueError("it must be a power of two ≥ 1, for example 65536, so that no bit is lost")
        return value
