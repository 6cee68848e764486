"""Gives layers that servers fuse one tensor scale, without changing a value where that is possible.

Servers join q, k and v, and gate and up, to one matrix with one tensor scale. vLLM takes the largest number
in the files of the parts and changes nothing else. So the parts must have the same scale in the file, or all
but one of them are multiplied by a wrong number.

A layer is moved to the tensor scale T of the one with the largest weight: its codes stay, and its block
scales are multiplied by t/T ≤ 1. With tensor scales that are powers of two, the products are exact E4M3
numbers unless they are subnormal and lose bits. These blocks are rounded again, by the layer's own quantizer
with the largest weight of the group, and counted. With `fp32_scale`, t/T has 24 bits, so nearly all blocks of
all layers but one are rounded again.

Training with the largest weight of the group as `tensor_amax` gives the same codes: dividing S by a power of
two changes no quotient S/s, and the rounding of subnormal block scales only. Therefore no recipe has to share
the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.formats.block_format import NVFP4
from megalowbit.quantize.quantized_tensor import QuantizedTensor
from megalowbit.quantize.quantizer import BlockQuantizer


class Packed(NamedTuple):
    """A weight as it is written.

    Attributes:
        tensor: codes and scales, in blocks of one row.
        num_blocks: its number of blocks.
        num_rounded: how many of them were rounded again, because they cannot have the scale of the group.
        relative_change: norm of the difference that this made, divided by the norm of the weight.
    """

    tensor: QuantizedTensor
    num_blocks: int
    num_rounded: int = 0
    relative_change: float = 0.0


def pack(quantizer: BlockQuantizer, weight: Tensor, tensor_amax: Tensor | None = None) -> QuantizedTensor:
    """Quantise a weight (out_features, in_features) as a layer does in its forward, in blocks of one row.

    A tile of 16 rows becomes 16 blocks with its scale. `tensor_amax` is as for `Quantizer.quantize`.
    """
    packed = quantizer.quantize(weight, tensor_amax=tensor_amax)
    assert isinstance(packed, QuantizedTensor)
    block = packed.format.block
    assert block is not None  # formats with one scale for the tensor are refused before
    if block[0] == 1:
        return packed.packed()
    # as bytes, because not all devices repeat float8
    rows = packed.scales.view(torch.uint8).repeat_interleave(block[0], 0)[: weight.shape[0]]
    scales = rows.contiguous().view(packed.scales.dtype)
    return replace(packed.packed(), scales=scales, format=NVFP4)


def pack_group(quantizer: BlockQuantizer, weights: Mapping[str, Tensor]) -> dict[str, Packed]:
    """Quantise the layers of one fused group; in formats with a tensor scale they get a common one.

    Args:
        quantizer: that of the weights in the forward.
        weights: layer → weight (out_features, in_features), finite.
    """
    tensors = {name: pack(quantizer, weight) for name, weight in weights.items()}
    if len(tensors) == 1 or quantizer.encoding.format.scale != "e4m3":
        return {name: Packed(tensor, tensor.scales.numel()) for name, tensor in tensors.items()}
    # the number from which the quantizer computes the tensor scale
    largest = {
        name: weight.abs().amax().to(torch.float32) * quantizer.encoding.q_scalar
        for name, weight in weights.items()
    }
    leader = max(largest, key=lambda name: float(largest[name]))
    packed = {}
    for name, tensor in tensors.items():
        moved = _moved(tensor, tensors[leader])
        again = None
        if bool(moved.is_inexact.any()):
            again = pack(quantizer, weights[name], largest[leader])
        packed[name] = _joined(tensor, moved, again)
    return packed


class _Move(NamedTuple):
    """A tensor under another tensor scale, and the blocks whose values would differ."""

    tensor: QuantizedTensor
    is_inexact: Tensor  # (rows, blocks of a row)


def _moved(tensor: QuantizedTensor, leader: QuantizedTensor) -> _Move:
    """`tensor` under the tensor scale of `leader`."""
    assert tensor.tensor_scale is not None
    assert leader.tensor_scale is not None
    # in fp64, where the product of a block scale (4 bits) and a tensor scale (24 bits) is exact
    wanted = tensor.scales.to(torch.float64) * tensor.tensor_scale.double()
    target = leader.tensor_scale.double()
    scales = (wanted / target).to(torch.float32).to(torch.float8_e4m3fn)
    # 0x77 clears the signs of both codes; a block of zeros is exact under any scale
    has_values = (tensor.codes & 0x77).unflatten(1, (scales.shape[1], -1)).ne(0).any(2)
    is_inexact = (scales.double() * target != wanted) & has_values
    return _Move(replace(tensor, scales=scales, tensor_scale=leader.tensor_scale), is_inexact)


def _joined(before: QuantizedTensor, moved: _Move, again: QuantizedTensor | None) -> Packed:
    """The moved tensor, with the blocks of `again` where it is not exact."""
    tensor, is_inexact = moved
    num_blocks = is_inexact.numel()
    if again is None:
        return Packed(tensor, num_blocks)
    assert tensor.tensor_scale is not None
    assert again.tensor_scale is not None
    assert torch.equal(tensor.tensor_scale, again.tensor_scale)
    scales = torch.where(is_inexact, again.scales.view(torch.uint8), tensor.scales.view(torch.uint8))
    blocks = tensor.codes.unflatten(1, (is_inexact.shape[1], -1))
    new_blocks = again.codes.unflatten(1, (is_inexact.shape[1], -1))
    codes = torch.where(is_inexact.unsqueeze(2), new_blocks, blocks).flatten(1)
    joined = replace(tensor, codes=codes, scales=scales.view(torch.float8_e4m3fn))
    old, new = (each.dequantize().float() for each in (before, joined))
    norm = torch.linalg.vector_norm(old)
    distance = torch.linalg.vector_norm(old - new)
    return Packed(joined, num_blocks, int(is_inexact.sum()), float(distance / norm))
