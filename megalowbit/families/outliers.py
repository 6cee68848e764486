"""Outliers that are planted into a model before training, to see how a recipe bears them.

Trained models have a few channels that are much larger than the others (Dettmers et al., arXiv:2208.07339);
small models of short runs have not. Planting multiplies the same few channels everywhere: those of the norms
in the blocks, which scale the inputs of the projections behind them, or those of the token embedding, which
the residual stream carries through all blocks. It changes the function of the model, so a run is only
comparable with one that has the same outliers. Training may undo them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megalowbit.errors import UserError
from megalowbit.values import SettingsModel, unit

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from megalowbit.families.base import Family


class OutlierSettings(SettingsModel):
    """Which channels are multiplied, and by how much."""

    where: Literal["norms", "embedding"] = Field(
        default="norms",
        description="`norms`: weights of the norms in all blocks. `embedding`: the token embedding, and with "
        "it a tied output projection",
    )
    channels: int = Field(
        default=4,
        ge=1,
        description="number of channels, drawn with `run.seed`; the same ones everywhere",
        json_schema_extra=unit("channels"),
    )
    factor: float = Field(
        default=30.0, gt=0, allow_inf_nan=False, description="what their weights are multiplied by"
    )


def plant(model: PreTrainedModel, family: Family, settings: OutlierSettings, *, seed: int) -> None:
    """Multiply the chosen channels of a model, in place.

    Args:
        model: a full model that is not converted.
        family: its family.
        settings: which channels, and the factor.
        seed: chooses the channels.

    Raises:
        UserError: the model has fewer channels.
    """
    import torch

    chosen = channels_of(model, settings, seed=seed)
    with torch.no_grad():
        for weight in weights_with_outliers(model, family, settings):
            weight[..., chosen] *= settings.factor


def channels_of(model: PreTrainedModel, settings: OutlierSettings, *, seed: int) -> Tensor:
    """The channels that `plant` multiplies.

    Raises:
        UserError: the model has fewer channels.
    """
    import torch

    hidden = model.config.hidden_size
    if settings.channels > hidden:
        raise UserError(
            f"megalowbit.model.outliers.channels = {settings.channels} is above the model's hidden size "
            f"{hidden}: lower it"
        )
    return torch.randperm(hidden, generator=torch.Generator().manual_seed(seed))[: settings.channels]


def weights_with_outliers(model: PreTrainedModel, family: Family, settings: OutlierSettings) -> list[Tensor]:
    """The weights that `plant` changes; their last dimension is that of the channels."""
    if settings.where == "embedding":
        return [model.get_submodule(family.tokens).weight]
    return [
        module.weight
        for module in model.get_submodule(family.blocks).modules()
        # by its class, because families have no list of their norms; norms of heads are smaller
        if type(module).__name__.endswith("Norm") and module.weight.shape == (model.config.hidden_size,)
    ]
