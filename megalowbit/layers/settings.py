"""Settings of the regulariser, which have their own section in the configuration, apart from the recipe.

They import pydantic only, so a configuration is checked without loading torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from megalowbit.values import SettingsModel

NotNegative = Annotated[float, Field(ge=0)]


class RegularizerSettings(SettingsModel):
    """`"regularizer"`: the dual-range regulariser, see `layers.regularizer`.

    Attributes:
        strength: λ; 0 turns the regulariser off.
        alpha1: α₁, against large weights.
        alpha2: α₂, against small ones.
        epsilon: ε in 1/(W² + ε), at least 1e-8; √ε is the magnitude below which weights are pushed no
            harder. 1e-8 pushes so hard that clipping leaves little of the loss; see `layers.regularizer`.
        max_gradient: cap on the magnitude of each element of its gradient.
    """

    strength: NotNegative = 0.0
    alpha1: NotNegative = 1.0
    alpha2: NotNegative = 1.0
    epsilon: float = Field(default=1e-5, ge=1e-8)
    max_gradient: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _has_something_to_do(self) -> RegularizerSettings:
        if self.strength and not (self.alpha1 or self.alpha2):
            raise ValueError("alpha1 and alpha2 are both 0: set one of them, or strength to 0")
        return self
