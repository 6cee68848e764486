"""NVFP4's two-level scales: one fp32 number for the tensor, one E4M3 number for each block of 16.

With A the tensor's largest magnitude and a that of one block:

    S = 448·6 / A                     (A = 0: 1; at most 2¹²⁶, so that 1/S is a normal number)
    s = e4m3(min(a / (6/S), 448))     one block's scale, nearest even
    element = round(x · (S/s))        decoded as element · s · (1/S)

each operation rounded to fp32 once, in this order; other implementations held equal to this one must keep it.
a / (6/S) rather than a·S/6, because it is exact whenever S is a power of two and costs one pass.

Non-finite numbers: a block that holds an infinity or a NaN gets the scale NaN (E4M3 has one), so its 16
elements decode to NaN and the damage stays visible; A is taken over the other blocks, which are not
disturbed. A block too small for E4M3 (below 2⁻¹⁰ after scaling) gets the scale 0 and decodes to zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.formats.element import ElementFormat
from megalowbit.formats.tables import cached_table

BLOCK_SIZE = 16
E4M3_MAX = 448.0
MAX_ENCODE_SCALE = 2.0**126


class BlockScales(NamedTuple):
    """Scales of one tensor cut into blocks.

    Attributes:
        codes: float8_e4m3fn (blocks, 1); NaN marks a block with non-finite elements.
        decoded: the same numbers in fp32.
        encode: fp32 (blocks, 1), what elements are multiplied by: S/s, 0 where s is 0 or NaN.
        tensor_scale: fp32, 0-dim, 1/S.
        unclamped: fp32 (blocks, 1), block scales before the clamp to 448 and the rounding.
    """

    codes: Tensor
    decoded: Tensor
    encode: Tensor
    tensor_scale: Tensor
    unclamped: Tensor


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each row.

    Args:
        blocks: fp32, fp16 or bf16 (blocks, block size), contiguous.

    Returns:
        fp32 (blocks, 1); not finite exactly where the row is not.
    """
    # Magnitudes order like their bit patterns, NaN above all; integer maxima are twice as fast on a CPU.
    integer, mask = (torch.int32, 0x7FFFFFFF) if blocks.dtype == torch.float32 else (torch.int16, 0x7FFF)
    bits = torch.bitwise_and(blocks.view(integer), mask)
    return bits.amax(dim=1, keepdim=True).view(blocks.dtype).to(torch.float32)


def two_level_scales(amax: Tensor, element: ElementFormat, tensor_amax: Tensor | None = None) -> BlockScales:
    """Scales of the blocks whose largest magnitudes are `amax`.

    Args:
        amax: fp32 (blocks, 1), at least one block.
        element: the format of the elements.
        tensor_amax: fp32, 0-dim: the tensor's largest magnitude where these blocks are only a part of it
            (shards of one tensor must agree); `None` takes it from `amax`.
    """
    amax = torch.sub(amax, amax, alpha=0.0)  # inf - 0·inf: infinities become NaN, which the clamp below keeps
    if tensor_amax is None:
        tensor_amax = torch.nan_to_num(amax, nan=0.0).amax()
    # Both operands of a division are tensors: torch replaces division by a Python number with a product.
    encode_scale = torch.div(torch.full_like(tensor_amax, E4M3_MAX * element.max), tensor_amax)
    encode_scale = torch.where(tensor_amax > 0, encode_scale.clamp_(max=MAX_ENCODE_SCALE), 1.0)
    unclamped = torch.div(amax, torch.div(torch.full_like(encode_scale, element.max), encode_scale))
    codes = torch.clamp(unclamped, max=E4M3_MAX).to(torch.float8_e4m3fn)
    decoded = decode_e4m3(codes)
    encode = torch.div(encode_scale, decoded).nan_to_num_(nan=0.0, posinf=0.0)
    return BlockScales(codes, decoded, encode, torch.reciprocal(encode_scale), unclamped)


@cached_table
def _e4m3_values(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).to(device)


def decode_e4m3(codes: Tensor) -> Tensor:
    """E4M3 numbers as fp32, by table: five times as fast as the cast on a CPU."""
    index = codes.view(torch.uint8).to(torch.int32).view(-1)
    return _e4m3_values(codes.device).index_select(0, index).view(codes.shape)
