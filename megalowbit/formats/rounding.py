"""Rounding already-scaled numbers onto an element grid: nearest even, and stochastic.

Both return codes: the position in the grid, with the sign bit of the input above it (of a zero too, as
hardware does). NaN gives code 0; what a NaN means is the block scale's business.

Stochastic rounding adds a random byte to the real-valued code and floors,

    t = the code of |x|, linear between grid points      (E2M1: min(2|x|, |x| + 2, |x|/2 + 4) in fp32)
    code = min(floor(t + (byte + ½)/256), top)

so that x goes up with probability (x - lo)/(hi - lo), to the 8 bits that Blackwell's own conversion takes
(PTX `cvt.rs.satfinite.e2m1x4` spends 32 random bits on four elements). Whole codes never move. A number less
than 1/512 of a gap above its lower neighbour never goes up, though: of numbers with a long tail, most are
lost. Unbiased rounding takes a random odd multiple r of 2⁻²⁴ instead,

    code = floor(t) + (r < t - floor(t))

which errs by at most 2⁻²⁴ in probability, and by what t loses in fp32: at most 2⁻¹⁸ of a gap (E4M3, E5M2),
2⁻²² (E2M1) or nothing (integers), rounded to nearest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalowbit.formats.element import ElementFormat
from megalowbit.formats.tables import cached_table


@cached_table
def _boundaries(element: ElementFormat, device: torch.device) -> Tensor:
    """Thresholds in fp32, so that "greater than the i-th" sends each tie to the even code."""
    thresholds = torch.tensor(element.thresholds, dtype=torch.float32, device="cpu")
    thresholds[1::2] = torch.nextafter(thresholds[1::2], torch.full_like(thresholds[1::2], -math.inf))
    return thresholds.to(device)


def nearest_codes(scaled: Tensor, element: ElementFormat) -> Tensor:
    """Codes of nearest-even rounding, saturating.

    Args:
        scaled: fp32 numbers already divided by their scale, any shape.
        element: the format.

    Returns:
        uint8 of the same shape.
    """
    codes = torch.bucketize(scaled.abs().contiguous(), _boundaries(element, scaled.device), out_int32=True)
    return _with_sign(codes, scaled, element)


def stochastic_codes(scaled: Tensor, random: Tensor, element: ElementFormat) -> Tensor:
    """Codes of stochastic rounding, saturating.

    Args:
        scaled: fp32 numbers already divided by their scale, any shape.
        random: one number for each element: uint8, or fp32 r of unbiased rounding.
        element: the format.

    Returns:
        uint8 of the same shape.
    """
    magnitude = scaled.abs()
    position = torch.zeros_like(magnitude)
    for bound, weight in element.knots[::-1]:
        position += magnitude.clamp(max=bound) * weight
    if random.dtype == torch.uint8:
        codes = position.add_((random.to(torch.float32) + 0.5) * (1 / 256)).floor_()
    else:
        codes = position.floor()
        codes += random < position - codes
    codes = codes.nan_to_num_(nan=0.0).clamp_(max=len(element.grid) - 1)
    return _with_sign(codes.to(torch.int32), scaled, element)


def _with_sign(codes: Tensor, scaled: Tensor, element: ElementFormat) -> Tensor:
    signed = codes | (torch.signbit(scaled).to(torch.int32) * element.sign_code)
    return torch.where(scaled.isnan(), 0, signed).to(torch.uint8)


@cached_table
def _values(element: ElementFormat, device: torch.device) -> Tensor:
    return torch.tensor(element.code_values(), dtype=torch.float32, device=device)


def code_values(codes: Tensor, element: ElementFormat) -> Tensor:
    """The numbers codes stand for: fp32, same shape."""
    return _values(element, codes.device)[codes.to(torch.int32)]
