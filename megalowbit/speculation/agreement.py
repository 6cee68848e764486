"""What ranks have to agree on before precisions are chosen: settings, and layers that have a choice.

Whatever is wrong on one rank, be it only a setting that is no setting, is told by all of them in the one
exchange that they wait in; a rank that stopped before it would leave the others waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from megalowbit.distributed import process_group
from megalowbit.errors import UserError, invalid_settings
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers, random_stream
from megalowbit.speculation.exchange import Exchange
from megalowbit.speculation.precisions import PRODUCTS, check_base, recipe_with
from megalowbit.speculation.settings import SpeculationSettings


def agreed(
    model: nn.Module, settings: SpeculationSettings | Mapping[str, Any], group: dist.ProcessGroup | None
) -> tuple[SpeculationSettings, Exchange]:
    """Settings and layers that all ranks of the group agree on; collective. A pipeline stage may have none.

    Returns:
        The settings, validated, and what the ranks will pool their findings with.

    Raises:
        UserError: settings, a recipe or a layer do not allow it on some rank, or two ranks with the same
            layers draw the same random numbers; raised on all.
    """
    valid, problem = None, None
    try:
        valid = _validated(settings)
        _check_layers(model, valid)
    except UserError as error:  # the other ranks wait to hear it
        problem = str(error)
    exchange = Exchange(
        [layer.layer_name for layer in bit_layers(model).values()],
        {} if valid is None else valid.model_dump(),
        group,
        problem=problem,
    )
    assert valid is not None  # the problem has been raised
    process_group.check_numbers_differ(_numbers(model), group)
    return valid, exchange


def _numbers(model: nn.Module) -> tuple[object, ...] | None:
    """What random numbers follow from; `None` where ranks that hold shards rightly draw the same."""
    stream = random_stream(model)
    if stream is None or any(getattr(each, "tensor_model_parallel", False) for each in model.parameters()):
        return None
    return stream.seed, stream.rank, tuple(bit_layers(model))  # pipeline stages have other layers


def _validated(settings: SpeculationSettings | Mapping[str, Any]) -> SpeculationSettings:
    if isinstance(settings, SpeculationSettings):
        return settings
    try:
        return SpeculationSettings.model_validate(settings)
    except ValidationError as error:
        raise invalid_settings(error, "speculation", SpeculationSettings) from None


def _check_layers(model: nn.Module, settings: SpeculationSettings) -> None:
    layers = list(bit_layers(model).values())
    names = Counter(layer.layer_name for layer in layers)
    for name, count in names.items():
        if not name or count > 1:
            raise UserError(
                f"{count} BitLinear layers have the name {name!r}: let megalowbit.convert make them, or "
                "set a layer_name of its own for each"
            )
    for layer in layers:
        _check_layer(layer, settings)


def _check_layer(layer: BitLinear, settings: SpeculationSettings) -> None:
    if layer.chooser is not None:
        raise UserError(
            f"layer {layer.layer_name!r} has a controller already: call detach() of that one, which is the "
            "layer's chooser, first"
        )
    if layer.is_split:
        raise UserError(
            f"layer {layer.layer_name!r} is split into parameters, whose products have no precision of their "
            "own: leave parameter_split or speculation out"
        )
    check_base(layer.recipe)
    for candidate in settings.ladder:  # blocks of a candidate may not fit a shard of a tensor-parallel layer
        layer.check_recipe(recipe_with(layer.recipe, [candidate] * len(PRODUCTS)))
