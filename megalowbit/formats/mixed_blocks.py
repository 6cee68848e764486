"""Blocks that are INT8 or E5M2, each as suits it: the definition of the choice, of scales and codes.

A block whose largest element stands far above the others leaves them few of INT8's 127 steps; E5M2 has the
same relative error at every size. At what ratio of maximum M to standard deviation σ of the others the second
is the better one follows from the errors: INT8 leaves (M/127)²/12, E5M2 about .0028 σ²; equal at M/σ ≈ 23.

The others are measured by their mean magnitude, which for a Gaussian is σ·√(2/π): a block of n elements is
E5M2 where

    Σ|c| - 127 < 141/32 · (n - 1)        141/32 ≈ 127/23 · √(2/π)

with c the codes of INT8, rounded to nearest even whatever the rounding of the result: whole numbers, so every
backend decides alike. Padding is no element. With a the block's largest magnitude and every operation rounded
to fp32 once, the stored scale is

- a/127 of an INT8 block, 1 where that is 0: also where all elements are
- -(a/57344) of an E5M2 block; one where a/57344 is no normal number stays INT8
- NaN, its sign bit clear, where a is not finite; codes then are 0

Codes are sign and magnitude in both, x / |scale| rounded to the format's finite grid; a zero keeps its sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalowbit.formats.block_scale import BlockScales
from megalowbit.formats.codes import code_values, nearest_codes, stochastic_codes
from megalowbit.formats.element import E5M2, INT8

THRESHOLD = (141, 32)  # numerator, denominator
SMALLEST_E5M2_SCALE = 2.0**-126


def mixed_scales_and_codes(
    matrix: Tensor, amax: Tensor, cols: int, random: Tensor | None
) -> tuple[BlockScales, Tensor]:
    """Choose each block's format and quantise it.

    Args:
        matrix: fp32 (rows, padded columns), padded with zeros.
        amax: fp32 (rows, blocks of a row), largest magnitudes; NaN where the block has an infinity or a NaN.
        cols: columns without padding.
        random: as for `stochastic_codes`, in the shape of `matrix`; `None` rounds to nearest even.

    Returns:
        Scales, whose `codes` are signed, and uint8 codes of the shape of `matrix`.
    """
    blocks = matrix.unflatten(1, (amax.shape[1], -1))  # (rows, blocks, elements)
    int8_scale = torch.div(amax, torch.full_like(amax, INT8.max))
    int8_scale = torch.where(int8_scale == 0, 1.0, int8_scale)
    e5m2_scale = torch.div(amax, torch.full_like(amax, E5M2.max))
    codes = nearest_codes(blocks / int8_scale.unsqueeze(-1), INT8)
    is_e5m2 = _prefers_e5m2(codes, cols) & (e5m2_scale >= SMALLEST_E5M2_SCALE)  # a NaN is not

    scale = torch.where(is_e5m2, e5m2_scale, int8_scale)
    scaled = blocks / scale.unsqueeze(-1)
    if random is None:
        e5m2_codes = nearest_codes(scaled, E5M2)
    else:
        codes, e5m2_codes = (
            stochastic_codes(scaled, random.view(blocks.shape), element) for element in (INT8, E5M2)
        )
    codes = torch.where(is_e5m2.unsqueeze(-1), e5m2_codes, codes)
    codes = torch.where(scale.isnan().unsqueeze(-1), 0, codes)
    signed = torch.where(is_e5m2, -scale, scale)
    overflows = torch.zeros_like(is_e5m2)
    return BlockScales(signed, scale, scale, None, overflows), codes.view(matrix.shape)


def _prefers_e5m2(codes: Tensor, cols: int) -> Tensor:
    """Whether the others of a block are small beside its largest: bool (rows, blocks).

    Args:
        codes: uint8 (rows, blocks, elements), INT8 rounded to nearest even.
        cols: elements of a row that are no padding.
    """
    numerator, denominator = THRESHOLD
    sums = (codes & (INT8.sign_code - 1)).sum(-1, dtype=torch.int32)
    size = codes.shape[-1]
    first = torch.arange(codes.shape[1], device=codes.device, dtype=torch.int32) * size
    elements = (cols - first).clamp(max=size)
    return (sums - int(INT8.max)) * denominator < numerator * (elements - 1)


def mixed_values(codes: Tensor, is_e5m2: Tensor) -> Tensor:
    """The numbers that uint8 codes stand for: fp32, same shape.

    `is_e5m2` says for each code whether its block's scale has its sign bit set.
    """
    return torch.where(is_e5m2, code_values(codes, E5M2), code_values(codes, INT8))


def largest_elements(is_e5m2: Tensor) -> Tensor:
    """What the largest magnitude of a block becomes: fp32, the shape of `is_e5m2`."""
    return torch.where(is_e5m2, E5M2.max, INT8.max).to(torch.float32)
