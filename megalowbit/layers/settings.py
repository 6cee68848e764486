"""The default recipe's name, and settings of layers outside the recipe; imported without torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from megalowbit.values import SettingsModel

# Of a whole model whose recipe is not named. A single BitLinear has no blocks, and takes "nvfp4".
DEFAULT_RECIPE = "nvfp4-first-block-fp8"
ROTARY_RECIPE = "nvfp4-attention-fp8"  # what to name for models without the layers that the default names

NotNegative = Annotated[float, Field(ge=0)]


class ActivationCheckpointingSettings(SettingsModel):
    """Which blocks recompute their activations in backward instead of keeping them. Losses and gradients do
    not change by a bit; a recomputed block costs its forward once more.
    """

    every: int = Field(default=0, ge=0, description="recompute blocks 0, n, 2n, … 1: all blocks. 0: none")
    first: int | None = Field(
        default=None, ge=1, description="of these, only blocks among the first so many. `null`: all of them"
    )

    @model_validator(mode="after")
    def _has_blocks_to_choose_from(self) -> ActivationCheckpointingSettings:
        if self.first is not None and not self.every:
            raise ValueError("first has no effect without every: set every to 1")
        return self

    def is_recomputed(self, index: int) -> bool:
        """Whether the block with this index, counted from 0, is recomputed."""
        is_chosen = self.every > 0 and index % self.every == 0
        return is_chosen and (self.first is None or index < self.first)


class RegularizerSettings(SettingsModel):
    """The dual-range regulariser of the low-bit layers' weights (`layers/regularizer.py`). Off by default."""

    strength: NotNegative = Field(default=0.0, description="λ, the factor of the penalty. 0: off")
    alpha1: NotNegative = Field(default=1.0, description="α₁, weight of the penalty on large weights")
    alpha2: NotNegative = Field(default=1.0, description="α₂, weight of the penalty on small weights")
    epsilon: float = Field(
        default=1e-5,
        ge=1e-8,
        description="ε in 1/(W² + ε). The push on small weights stops growing below the magnitude √ε. With "
        "1e-8 the push is so strong that clipping leaves little of the loss's gradient",
    )
    max_gradient: float = Field(
        default=1.0, gt=0, description="largest magnitude of each element of the penalty's gradient"
    )

    @model_validator(mode="after")
    def _has_something_to_do(self) -> RegularizerSettings:
        if self.strength and not (self.alpha1 or self.alpha2):
            raise ValueError("alpha1 and alpha2 are both 0: set one of them, or strength to 0")
        return self
