"""Which layers of a converted model are packed, in which groups, with which scales of inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megalowbit.errors import UserError, shown
from megalowbit.formats.block_scale import tensor_encode_scale
from megalowbit.hf.packed.layout import PackedLayout
from megalowbit.hf.packed.recipes import (
    PackedFormat,
    Precision,
    bits_of_weights,
    check_size,
    fused_groups,
    packed_format,
)
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.layers.conversion.kept_layers import linear_layers
from megalowbit.layers.conversion.refusals import refuse_partitioned
from megalowbit.layers.tensor_parallel.bitlinear import ParallelBitLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackingPlan(NamedTuple):
    """What is packed, and how.

    Attributes:
        layout: names and meaning of the tensors.
        format: of all packed layers.
        groups: names of packed layers that servers fuse, in the model's order.
        ignored: names of linear layers that stay in high precision.
        wide: those of them whose weights have 8 bits in the recipe's forward.
        shapes: (out_features, in_features) of each packed layer.
        input_scales: layer → tensor scale of its input; empty if servers need none.
    """

    layout: PackedLayout
    format: PackedFormat
    groups: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...]
    wide: tuple[str, ...]
    shapes: dict[str, tuple[int, int]]
    input_scales: dict[str, Tensor]


def plan_packing(
    model: PreTrainedModel,
    layout: PackedLayout,
    precision: Precision,
    input_maxima: Mapping[str, float] | None = None,
) -> PackingPlan:
    """Decide what is packed.

    Args:
        model: converted; may be on the meta device.
        layout: of the result.
        precision: `w4a16`: weights are packed; `w4a4`: servers also round inputs.
        input_maxima: largest magnitude of the input of each packed layer; for `w4a4` in NVFP4.

    Raises:
        UserError: the layout or servers cannot hold the model.
    """
    refuse_partitioned(model)
    low_bit, linear = bit_layers(model), linear_layers(model)
    if not low_bit:
        raise UserError(f"{type(model).__name__} has no low-bit layers to pack: convert it first")
    for name, layer in low_bit.items():  # before the format, which another recipe could change
        if isinstance(layer, ParallelBitLinear) and layer.shards is not None:
            raise UserError(f"layer {name} is a shard: save a checkpoint of the run and export that")
        if layer.is_transposed:
            raise UserError(
                f"layer {name} replaces a Conv1D, and transformers loads no packed weights into such layers, "
                "so GPT-2 cannot be packed: use an ordinary Hugging Face folder, or a LLaMA"
            )
    bits = {name: bits_of_weights(layer.recipe) for name, layer in low_bit.items()}
    packed = {name: layer for name, layer in low_bit.items() if (bits[name] or 0) < 8}
    format = _common_format(packed or low_bit, precision)
    if format.name not in layout.formats:
        raise UserError(
            f"the layout {layout.name} has no {format.name.upper()} weights: use compressed-tensors"
        )
    for name, layer in packed.items():
        check_size(name, layer.in_features, format)
    in_features = {name: int(layer.in_features) for name, layer in linear.items()}  # type: ignore[arg-type]
    groups = fused_groups(in_features, packed)
    return PackingPlan(
        layout,
        format,
        tuple(groups),
        tuple(name for name in linear if name not in packed),
        tuple(name for name, value in bits.items() if value == 8),
        {name: (layer.out_features, layer.in_features) for name, layer in packed.items()},
        _input_scales(format, groups, input_maxima),
    )


def _common_format(layers: Mapping[str, BitLinear], precision: Precision) -> PackedFormat:
    """The format of all layers, whose recipes may differ in their backward.

    Raises:
        UserError: there are several, or see `packed_format`.
    """
    by_recipe = {each: packed_format(each, precision) for each in {layer.recipe for layer in layers.values()}}
    first, *others = dict.fromkeys(by_recipe.values())
    if others:
        names = ", ".join(sorted(each.name for each in by_recipe))
        raise UserError(
            f"the layers have different recipes ({names}), and a packed model has one format: use recipes "
            "with the same forward, or keep layers in high precision (the recipe's keep)"
        )
    return first


def _input_scales(
    format: PackedFormat, groups: list[tuple[str, ...]], maxima: Mapping[str, float] | None
) -> dict[str, Tensor]:
    """The tensor scale of each layer's input, as training would compute it; layers of a group have one."""
    encoding = format.input_encoding
    if encoding is None or format.name != "nvfp4":
        return {}
    found = {}
    for group in groups:
        for name in group:
            value = None if maxima is None else maxima.get(name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is None or not is_number or not math.isfinite(value) or value < 0:
                raise UserError(
                    f'precision "w4a4" needs the largest input of layer {name}, and it is {shown(value)}: '
                    "use a checkpoint from the end of a run, which has recorded it, pass finite input_maxima "
                    'in Python, or use precision "w4a16"'
                )
        assert maxima is not None
        largest = torch.tensor(max(maxima[name] for name in group), dtype=torch.float32)
        encode_scale = tensor_encode_scale(
            largest, encoding.format, largest, is_power_of_two=encoding.is_power_of_two
        )
        found.update(dict.fromkeys(group, encode_scale.reciprocal()))
    return found
