"""`"layer_scaling"` of the configuration: a separate factor for the gradients of each block.

In a separate file, so that settings are checked without importing torch.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, field_validator

from megalowbit.values import SettingsModel

PositiveNumber = Annotated[float, Field(gt=0)]


class LayerScalingSettings(SettingsModel):
    """When and how far gradients inside a block are raised above those outside; see `LayerScaling`."""

    enabled: bool = Field(default=False, description="whether blocks have factors")
    modules: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description='name patterns of what has a factor, such as "*.attn" and "*.mlp"; none: the blocks that '
        "the model's longest ModuleList holds",
    )
    target: Annotated[PositiveNumber, Field(le=2.0**15)] = Field(
        default=2.0**11,
        description="where the largest stored gradient of a block should lie; four octaves below fp16's end, "
        "because gradients of activations are not watched",
    )
    # fp32 sums are divided by it
    max_factor: Annotated[PositiveNumber, Field(le=2.0**126)] = Field(
        default=2.0**16, description="largest factor, a power of two"
    )
    smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, description="share of the past in the moving average of log2 of the largest gradient"
    )
    every: Annotated[int, Field(ge=1)] = Field(
        default=1, description="applied steps between two changes; an overflow lowers a factor at once"
    )

    @field_validator("max_factor")
    @classmethod
    def _is_a_power_of_two(cls, value: float) -> float:
        if math.frexp(value)[0] != 0.5 or value < 1:
            raise ValueError("it must be a power of two ≥ 1, for example 65536, so that no bit is lost")
        return value
