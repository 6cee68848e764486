"""What a model goes through before DeepSpeed sees it: cut over ranks, made low-bit, given its random numbers.

The order is not free. AutoTP turns layers that it does not know into plain ones, so it comes before
conversion; the stages of a pipeline are parts of a whole model that is converted first; norms are kept in
fp32 before anything asks which parameters have masters.
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
from megalowbit.engine.pipeline.setup import begin_stage, groups_of, whole_of
from megalowbit.engine.run_checks.model import check_layers_kept, check_scaler
from megalowbit.engine.tensor_parallel.shard_model import shard_model
from megalowbit.errors import UserError
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
        recipe: how its layers quantise; None leaves them as they are.
        low_bit: names of its low-bit layers.
        mpu: what DeepSpeed is given; None for pipelines, which have groups of their own.
        groups: over which norm and overflow are reduced; None: each rank has the whole model.
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
    """Cut, convert and mark `model` in place; every rank must call it.

    `mpu` is the user's; without one the configuration cuts the model, if anything does. `seed` is that of
    stochastic rounding in layers that are converted here.
    """
    mpu = shard_model(model, parts) or mpu
    recipe = succeed_together(_prepare_part, model, parts, grid, seed)
    return PreparedModel(
        recipe=recipe, low_bit=tuple(bit_layers(model)), mpu=mpu, groups=groups_of(model) or mpu
    )


def _prepare_part(
    model: torch.nn.Module, parts: DeepSpeedConfigParts, grid: ProcessGrid, seed: int
) -> Recipe | None:
    """What every rank does to its own part of the model."""
    recipe = _convert_if_asked(whole_of(model), parts.settings.recipe, seed)
    begin_stage(model, parts)
    draw_own_numbers(model, grid)
    if parts.settings.fp32_norms:
        keep_fp32(whole_of(model))  # a stage may have no norm of its own
    return recipe


def check_prepared(engine: Any, prepared: PreparedModel) -> None:
    """Make sure that what was prepared is what the engine trains, with our scaler."""
    check_quantised(whole_of(engine.module), prepared.recipe)  # a stage may have no low-bit layer of its own
    check_layers_kept(engine.module, prepared.low_bit)
    check_scaler(engine)


def check_quantised(module: torch.nn.Module, recipe: Any) -> None:
    """Make sure that a run which asks for low-bit layers has some."""
    if recipe is None or not recipe.quantizes:
        return
    if not bit_layers(module):
        raise UserError(
            f"megalowbit.recipe = {recipe.name!r} asks for low-bit layers but the model has none: "
            'use recipe "bf16", or a model with projections the recipe does not keep'
        )


def draw_own_numbers(model: torch.nn.Module, grid: ProcessGrid) -> None:
    """Let every data-parallel rank round its own data with its own random numbers."""
    for layer in bit_layers(model).values():
        layer.set_data_rank(grid.data_rank)


def _convert_if_asked(model: torch.nn.Module, setting: str | dict[str, Any] | None, seed: int) -> Any:
    """Swap layers if the recipe quantises and nothing is swapped yet; returns the recipe, or None.

    Raises:
        UserError: layers were converted with another recipe, or projections have no layer to be swapped.
    """
    if setting is None:
        return None
    recipe = recipe_of(setting)
    layers = bit_layers(model)
    for name, layer in layers.items():
        if layer.recipe != recipe:
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
