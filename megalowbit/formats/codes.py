"""Codes of an element grid: rounding numbers to codes, decoding them, and packing them into bytes.

Rounding is to nearest even or stochastic. A code is the position in the grid, with the sign bit of the input
above it (also for zeros, as in hardware). NaN gives code 0; a NaN is represented in the block scale instead.

Stochastic rounding adds a random fraction to the real-valued code and takes the floor,

    t = the code of |x|, linear between grid points      (E2M1: min(2|x|, |x| + 2, |x|/2 + 4) in fp32)
    code = floor(t + r/2²⁴),  0 ≤ r < 2²⁴

so x is rounded up with probability (x - lo)/(hi - lo), less at most 2⁻²⁴, plus the rounding of t to fp32: at
most 2⁻¹⁸ of a gap (E4M3, E5M2), 2⁻²² (E2M1) or nothing (integers). The sum is one of 32-bit integers. Numbers
on the grid never change.

With eight bits, as in Blackwell's conversion (PTX `cvt.rs.satfinite.e2m1x4` takes 32 random bits for four
elements), a number less than 1/512 of a gap above its lower neighbour is never rounded up. In a tensor with a
long tail, that sets most numbers to zero. The 24 bits here are the element's byte of a Philox call and those
of two neighbours (`quantize/philox.py`), so they cost no further random numbers. Neighbours are correlated by
1/256.

In a byte, the first code is in the lowest bits: two four-bit codes are stored as (first | second << 4), the
order of all FP4 libraries and of the hardware. Four codes of six bits fill three bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalowbit.formats.element import ElementFormat
from megalowbit.formats.tables import cached_table

FRACTION_BITS = 24  # random bits of an element; 7 are left for the code


@cached_table
def _boundaries(element: ElementFormat, device: torch.device) -> Tensor:
    """fp32 thresholds: numbers above the i-th get at least code i + 1, and ties get the even code."""
    thresholds = torch.tensor(element.thresholds, dtype=torch.float32, device="cpu")
    thresholds[1::2] = torch.nextafter(thresholds[1::2], torch.full_like(thresholds[1::2], -math.inf))
    return thresholds.to(device)


def nearest_codes(scaled: Tensor, element: ElementFormat) -> Tensor:
    """Codes rounded to nearest even, with saturation: uint8 in the shape of `scaled`.

    `scaled` is fp32, already divided by the block scale.
    """
    codes = torch.bucketize(scaled.abs().contiguous(), _boundaries(element, scaled.device), out_int32=True)
    return _with_sign(codes, scaled, element)


def stochastic_codes(scaled: Tensor, random: Tensor, element: ElementFormat) -> Tensor:
    """Codes rounded stochastically, with saturation; otherwise as `nearest_codes`.

    `random` is int32 in the shape of `scaled`: the number r below 2²⁴ of each element.
    """
    magnitude = scaled.abs()
    position = torch.zeros_like(magnitude)
    for bound, weight in element.knots[::-1]:
        position += magnitude.clamp(max=bound) * weight
    fixed = position.nan_to_num_(nan=0.0).mul_(2.0**FRACTION_BITS).to(torch.int32)  # below 2³¹ with `random`
    return _with_sign((fixed + random) >> FRACTION_BITS, scaled, element)


def _with_sign(codes: Tensor, scaled: Tensor, element: ElementFormat) -> Tensor:
    signed = codes | (torch.signbit(scaled).to(torch.int32) * element.sign_code)
    return torch.where(scaled.isnan(), 0, signed).to(torch.uint8)


@cached_table
def _values(element: ElementFormat, device: torch.device) -> Tensor:
    return torch.tensor(element.code_values(), dtype=torch.float32, device=device)


def code_values(codes: Tensor, element: ElementFormat) -> Tensor:
    """Decode codes: fp32, same shape."""
    return _values(element, codes.device)[codes.to(torch.int32)]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis.

    Args:
        codes: uint8 (…, n), each below 2^bits; n·bits is a multiple of 8 (of 24 for 6 bits).
        bits: 1, 2, 4, 6 or 8.

    Returns:
        uint8 (…, n·bits/8).
    """
    if bits == 8:
        return codes
    count = 4 if bits == 6 else 8 // bits
    parts = codes.to(torch.int32).unflatten(-1, (-1, count))
    shifts = torch.arange(count, device=codes.device, dtype=torch.int32) * bits
    words = (parts << shifts).sum(-1, dtype=torch.int32)
    if bits != 6:
        return words.to(torch.uint8)
    byte_shifts = torch.arange(3, device=codes.device, dtype=torch.int32) * 8
    return (words.unsqueeze(-1) >> byte_shifts & 0xFF).to(torch.uint8).flatten(-2)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_codes`: uint8 codes, the last axis 8/bits times as long."""
    if bits == 8:
        return packed
    words, count = packed.to(torch.int32), 8 // bits
    if bits == 6:
        byte_shifts = torch.arange(3, device=packed.device, dtype=torch.int32) * 8
        words, count = (words.unflatten(-1, (-1, 3)) << byte_shifts).sum(-1, dtype=torch.int32), 4
    shifts = torch.arange(count, device=packed.device, dtype=torch.int32) * bits
    return (words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)
