"""Prepares a model before DeepSpeed gets it: shard, convert to low-bit layers, set random numbers.

The order matters. AutoTP replaces layers that it does not recognise by plain ones, so it runs before
conversion. Pipeline stages are parts of a full model, which is converted first. Norms are marked to stay in
fp32 before masters are created.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from megalowbit.config.deepspeed_json import DeepSpeedConfigParts
from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import succeed_together
from megalowbit.distributed.mpu import GroupsOfRank
from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.engine.pipeline.setup import begin_stage, full_model_of, groups_of
from megalowbit.engine.run_checks.model import check_layers_kept, check_scaler
from megalowbit.engine.tensor_parallel.shard_model import shard_model
from megalowbit.errors import UserError
from megalowbit.hf.activation_checkpointing import recompute_blocks
from megalowbit.hf.losses.chunked_cross_entropy import chunk_cross_entropy
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.conversion.kept_layers import missed_weights
from megalowbit.layers.conversion.report import refuse_missed
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.optim.precision.fp32_modules import keep_fp32

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A model that is ready for the engine.

    Attributes:
        recipe: how its layers quantise; None: they are not converted.
        low_bit: names of its low-bit layers.
        mpu: the mpu for DeepSpeed; None for pipelines, which have their own groups.
        groups: norm and overflow are reduced over these; None: each rank has the full model.
    """

    recipe: Recipe | None
    low_bit: Collection[str]
    mpu: GroupsOfRank | None
    groups: GroupsOfRank | None


def prepare_model(
    model: torch.nn.Module,
    parts: DeepSpeedConfigParts,
    grid: ProcessGrid,
    *,
    mpu: GroupsOfRank | None,
    seed: int,
) -> PreparedModel:
    """Shard, convert and mark `model` in place; every rank must call it.

    `mpu` is the user's. Without one, the configuration may shard the model. `seed` is the seed of stochastic
    rounding in the layers converted here.
    """
    mpu = shard_model(model, parts) or mpu
    recipe = succeed_together(_prepare_part, model, parts, grid, seed)
    return PreparedModel(
        recipe=recipe, low_bit=tuple(bit_layers(model)), mpu=mpu, groups=groups_of(model) or mpu
    )


def _prepare_part(
    model: torch.nn.Module, parts: DeepSpeedConfigParts, grid: ProcessGrid, seed: int
) -> Recipe | None:
    """Convert and mark this rank's part of the model."""
    refuse_former_attribute(model)
    recipe = _convert_if_asked(full_model_of(model), parts.settings.recipe, seed)
    begin_stage(model, parts)
    recompute_blocks(model, parts.settings.activation_checkpointing)
    if parts.settings.chunked_cross_entropy:
        chunk_cross_entropy(model)
    set_random_ranks(model, grid)
    if parts.settings.fp32_norms:
        keep_fp32(full_model_of(model))  # the full model, because a stage may have no norm
    return recipe


def refuse_former_attribute(model: torch.nn.Module) -> None:
    """Reject `parameter.cut`, the former name of `sharding`: without it, shards could not be joined later."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "cut"):
            raise UserError(
                f"parameter {name} has an attribute cut, which is now called sharding: set "
                "parameter.sharding = megalowbit.layers.tensor_parallel.Sharding(dim, parts) instead"
            )


def check_prepared(engine: Any, prepared: PreparedModel) -> None:
    """Check that the engine trains the prepared model and uses our loss scaler."""
    # the full model, because a stage may have no low-bit layer
    check_quantised(full_model_of(engine.module), prepared.recipe)
    check_layers_kept(engine.module, prepared.low_bit)
    check_scaler(engine)


def check_quantised(module: torch.nn.Module, recipe: Any) -> None:
    """Check that the model has low-bit layers if the recipe quantises."""
    if recipe is None or not recipe.quantizes:
        return
    if not bit_layers(module):
        raise UserError(
            f"megalowbit.recipe = {recipe.name!r} asks for low-bit layers but the model has none: "
            'use recipe "bf16", or a model with projections that the recipe converts'
        )


def set_random_ranks(model: torch.nn.Module, grid: ProcessGrid) -> None:
    """Give every data-parallel rank different random numbers for stochastic rounding."""
    for layer in bit_layers(model).values():
        layer.set_data_rank(grid.data_rank)


def _convert_if_asked(model: torch.nn.Module, setting: str | dict[str, Any] | None, seed: int) -> Any:
    """Convert the model if the recipe quantises and it is not converted yet; returns the recipe, or None.

    Raises:
        UserError: layers were converted with another recipe, or a projection cannot be converted.
    """
    if setting is None:
        return None
    recipe = recipe_of(setting)
    layers = bit_layers(model)
    for name, layer in layers.items():
        if layer.recipe != recipe.of_layer(layer.layer_name):
            raise UserError(
                f"megalowbit.recipe is {recipe.name!r} but layer {name} was converted with "
                f"{layer.recipe.name!r}: convert the model with the recipe of the configuration"
            )
    if recipe.quantizes and not layers:
        report = convert(model, recipe, seed=seed)
        if process_group.rank() == 0:
            logger.info("%s", report)
    refuse_missed(missed_weights(model, recipe), recipe)
    return recipe
