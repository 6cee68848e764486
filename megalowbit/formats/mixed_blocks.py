"""Mixed blocks, which are INT8 or E5M2: the definition of the choice, the scales and the codes.

If the largest element of a block is far above the others, few of INT8's 127 steps are left for them. E5M2 has
the same relative error for every magnitude. The mean squared errors are (M/127)²/12 for INT8 and about .0028
σ² for E5M2, with the maximum M and the standard deviation σ of the others. They are equal at M/σ ≈ 23.

σ is estimated from the mean magnitude of the others, which is σ·√(2/π) for a Gaussian. A block of n elements
is E5M2 if

    Σ|c| - 127 < 141/32 · (n - 1)        141/32 ≈ 127/23 · √(2/π)

where c are the INT8 codes rounded to nearest even, even if the result is rounded stochastically. All terms
are integers, so every backend makes the same choice. Padding does not count. With a the block's largest
magnitude, and every operation rounded to fp32 once, the stored scale is

- a/127 for an INT8 block; 1 if that is 0, for example because all elements are
- -(a/57344) for an E5M2 block; a block is INT8 if a/57344 is not a normal number
- NaN with a clear sign bit if a is not finite; the codes are 0

Codes are sign-magnitude in both formats: x / |scale| rounded to the format's finite grid. A zero keeps its
sign.
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
        amax: fp32 (rows, blocks per row), largest magnitudes; NaN if the block has an infinity or a NaN.
        cols: number of columns without padding.
        random: as for `stochastic_codes`, in the shape of `matrix`; `None` rounds to nearest even.

    Returns:
        The scales, whose `codes` are signed, and uint8 codes in the shape of `matrix`.
    """
    blocks = matrix.unflatten(1, (amax.shape[1], -1))  # (rows, blocks, elements)
    int8_scale = torch.div(amax, torch.full_like(amax, INT8.max))
    int8_scale = torch.where(int8_scale == 0, 1.0, int8_scale)
    e5m2_scale = torch.div(amax, torch.full_like(amax, E5M2.max))
    codes = nearest_codes(blocks / int8_scale.unsqueeze(-1), INT8)
    is_e5m2 = _prefers_e5m2(codes, cols) & (e5m2_scale >= SMALLEST_E5M2_SCALE)  # False for NaN

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
    """The choice described above: bool (rows, blocks).

    Args:
        codes: uint8 (rows, blocks, elements), INT8 rounded to nearest even.
        cols: number of columns without padding.
    """
    numerator, denominator = THRESHOLD
    sums = (codes & (INT8.sign_code - 1)).sum(-1, dtype=torch.int32)
    size = codes.shape[-1]
    first = torch.arange(codes.shape[1], device=codes.device, dtype=torch.int32) * size
    elements = (cols - first).clamp(max=size)
    return (sums - int(INT8.max)) * denominator < numerator * (elements - 1)


def mixed_values(codes: Tensor, is_e5m2: Tensor) -> Tensor:
    """Decode uint8 codes to fp32; `is_e5m2`: for each code, whether its block's scale is negative."""
    return torch.where(is_e5m2, code_values(codes, E5M2), code_values(codes, INT8))


def largest_elements(is_e5m2: Tensor) -> Tensor:
    """The element that the largest magnitude of a block is mapped to: fp32, in the shape of `is_e5m2`."""
    return torch.where(is_e5m2, E5M2.max, INT8.max).to(torch.float32)
