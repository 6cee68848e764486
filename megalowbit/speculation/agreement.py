"""Checks, across ranks, that settings and layers allow choosing precisions.

All ranks meet in one exchange, in which each reports its error, if it has one. Then all ranks raise it. A
rank that raised before the exchange would leave the others waiting.
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
    """Validate settings and layers on all ranks of the group; collective. A pipeline stage may have no
    layers.

    Returns:
        The validated settings, and the `Exchange` in which ranks will combine their findings.

    Raises:
        UserError: a setting, recipe or layer of some rank is not supported, or two ranks with the same layers
            draw the same random numbers; raised on all ranks.
    """
    valid, problem = None, None
    try:
        valid = _validated(settings)
        _check_layers(model, valid)
    except UserError as error:  # raised below, on all ranks
        problem = str(error)
    exchange = Exchange(
        [layer.layer_name for layer in bit_layers(model).values()],
        {} if valid is None else valid.model_dump(),
        0 if valid is None else len(valid.candidates) - 1,
        group,
        problem=problem,
    )
    assert valid is not None  # otherwise Exchange has raised the problem
    process_group.check_numbers_differ(_numbers(model), group)
    return valid, exchange


def _numbers(model: nn.Module) -> tuple[object, ...] | None:
    """The inputs of the random numbers; `None` for tensor-parallel shards, which draw the same by design."""
    stream = random_stream(model)
    if stream is None or any(getattr(each, "tensor_model_parallel", False) for each in model.parameters()):
        return None
    return stream.seed, stream.rank, tuple(bit_layers(model))  # pipeline stages differ in their layers


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
                f"{count} BitLinear layers have the name {name!r}: create them with megalowbit.convert, or "
                "set a different layer_name for each"
            )
    for layer in layers:
        _check_layer(layer, settings)


def _check_layer(layer: BitLinear, settings: SpeculationSettings) -> None:
    if layer.chooser is not None:
        raise UserError(
            f"layer {layer.layer_name!r} already has a controller (layer.chooser): call its detach() first"
        )
    if layer.is_split:
        raise UserError(
            f"layer {layer.layer_name!r} is split into parameters, which speculation does not support: leave "
            "parameter_split or speculation out"
        )
    check_base(layer.recipe)
    for candidate in settings.candidates:  # a tensor-parallel shard may not hold whole blocks of a candidate
        layer.check_recipe(recipe_with(layer.recipe, [candidate] * len(PRODUCTS)))
