"""Block scales that need no tensor scale: UE5M3, and the three levels of HiF4.

`ue5m3` (Fasoli et al., "Is Finer Better?", arXiv:2601.19026): five bits of exponent, three of mantissa, no
sign. Magnitudes are 0 and 2⁻¹⁷ … 114688; code 255 is NaN. With a the largest magnitude of a block and M the
largest element, s = UE5M3(a/M), and an element is round(x · (1/s)).

`hif4` (HiFloat4, arXiv:2602.11287): a block of 64 has a scale s in E6M2 (2⁻⁴⁸ … 49152, code 255 is NaN), one
bit for each eight elements and one for each four. A bit that is set doubles the scale of its elements. They
are stored as an int32, from the lowest bits: E6M2, the 8 bits, the 16 bits. To nearest,

    s = E6M2(bf16(a · bf16(1/7))), r = bf16(1/s)
    the bit of eight: a₈ · r ≥ 4; the bit of four: a₄ · r / (1 or 2) ≥ 2
    element = round(x · r / (1, 2 or 4))

with a₈ and a₄ the largest magnitudes of the eight and the four. Elements between 3.5 and 4 times a scale then
saturate, and r is not exact, so the expected value of stochastic rounding is off by up to 2⁻⁸. With scales
rounded up, s is not below a/7, r = 1/s in fp32, and a bit is set if the elements would not fit without it
(above 3.5, above 1.75). No element saturates then, up to the largest scale.

Block maxima above the largest scale times M saturate in both formats.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.formats.codes import nearest_codes
from megalowbit.formats.element import ElementFormat
from megalowbit.formats.tables import cached_table

NAN_CODE = 255
HIF4_MAX = 7.0  # largest element times the largest factors, 1.75 · 2 · 2
EIGHTS, FOURS = 8, 16  # bits of a block


def _grid(mantissa_bits: int, bias: int, has_zero: bool) -> tuple[float, ...]:
    steps, numbers = 2**mantissa_bits, []
    for code in range(NAN_CODE):
        exponent, mantissa = divmod(code, steps)
        is_subnormal = has_zero and exponent == 0
        significand = mantissa / steps + (not is_subnormal)
        numbers.append(math.ldexp(significand, exponent + is_subnormal - bias))
    return tuple(numbers)


# Nine bits, because these formats have no sign.
UE5M3 = ElementFormat(name="ue5m3", bits=9, grid=_grid(3, 15, has_zero=True))
E6M2 = ElementFormat(name="e6m2", bits=9, grid=_grid(2, 48, has_zero=False))


class WideScales(NamedTuple):
    """Scales as stored, decoded, and as factors of elements (fp32); whether they exceed the format."""

    codes: Tensor
    decoded: Tensor
    encode: Tensor
    overflows: Tensor


def ue5m3_scales(amax: Tensor, element: ElementFormat, is_up: bool) -> WideScales:
    """UE5M3 scales of blocks with these maxima, fp32, NaN if a block is not finite."""
    wanted = torch.div(amax, torch.full_like(amax, element.max))
    codes = _rounded(wanted, UE5M3, is_up)
    decoded = decode_ue5m3(codes)
    encode = torch.reciprocal(decoded).nan_to_num_(nan=0.0, posinf=0.0)
    return WideScales(codes, decoded, encode, wanted > UE5M3.max)


def hif4_scales(amax: Tensor, is_up: bool) -> WideScales:
    """HiF4 scales.

    Args:
        amax: fp32 (rows, 16 · blocks), the largest magnitude of each four elements; NaN if one is not finite.
        is_up: round scales up, see above.

    Returns:
        codes and overflows (rows, blocks), decoded and encode in the shape of `amax`.
    """
    fours = amax.unflatten(1, (-1, EIGHTS, FOURS // EIGHTS))
    eights = fours.amax(3)
    largest = eights.amax(2)
    wanted = _bf16(largest * _bf16(torch.full_like(largest, 1 / HIF4_MAX)))
    if is_up:
        wanted = torch.div(largest, torch.full_like(largest, HIF4_MAX))
    codes = _rounded(wanted, E6M2, is_up)
    scale = _numbers(E6M2, codes.device)[codes.to(torch.int64)]
    inverse = torch.reciprocal(scale)
    inverse = inverse if is_up else _bf16(inverse)
    of_eight = _is_double(eights * inverse.unsqueeze(2), 2.0, is_up)
    scaled = fours * inverse[..., None, None] / (1 + of_eight.unsqueeze(3))
    of_four = _is_double(scaled, 1.0, is_up)
    factor = ((1 + of_eight.unsqueeze(3)) * (1 + of_four)).flatten(2)
    words = codes.to(torch.int32)
    for bits, first in ((of_eight, 8), (of_four.flatten(2), 8 + EIGHTS)):
        words = words + (bits.to(torch.int32) << _places(bits.shape[2], first, bits.device)).sum(
            2, dtype=torch.int32
        )
    words = torch.where(largest.isnan(), NAN_CODE, words)
    decoded = (scale.unsqueeze(2) * factor).flatten(1)
    encode = (inverse.unsqueeze(2) / factor).nan_to_num_(nan=0.0).flatten(1)
    return WideScales(words, decoded, encode, wanted > E6M2.max)


def decode_ue5m3(codes: Tensor) -> Tensor:
    """UE5M3 numbers as fp32."""
    return _numbers(UE5M3, codes.device)[codes.to(torch.int64)]


def decode_hif4(words: Tensor) -> Tensor:
    """The scale of each four elements, fp32 (rows, 16 · blocks)."""
    scale = _numbers(E6M2, words.device)[(words & 0xFF).to(torch.int64)]
    of_eight = words.unsqueeze(2) >> _places(EIGHTS, 8, words.device) & 1
    of_four = words.unsqueeze(2) >> _places(FOURS, 8 + EIGHTS, words.device) & 1
    factor = (1 + of_eight.repeat_interleave(FOURS // EIGHTS, 2)) * (1 + of_four)
    return (scale.unsqueeze(2) * factor).flatten(1)


def _rounded(wanted: Tensor, format: ElementFormat, is_up: bool) -> Tensor:
    """uint8 codes of the nearest (ties to even) or next larger number; `NAN_CODE` for NaN."""
    codes = nearest_codes(wanted, format)
    if is_up:
        is_low = _numbers(format, codes.device)[codes.to(torch.int64)] < wanted.clamp(max=format.max)
        codes = codes + is_low
    return torch.where(wanted.isnan(), NAN_CODE, codes).to(torch.uint8)


def _is_double(scaled: Tensor, factor: float, is_up: bool) -> Tensor:
    """Whether maxima need a doubled scale, if `factor` is the one of the levels below."""
    return (scaled > 1.75 * factor) if is_up else (scaled >= 2 * factor)


def _bf16(numbers: Tensor) -> Tensor:
    return numbers.to(torch.bfloat16).to(torch.float32)


def _places(count: int, first: int, device: torch.device) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.int32, device=device)


@cached_table
def _numbers(format: ElementFormat, device: torch.device) -> Tensor:
    numbers = torch.tensor([*format.grid, math.nan], dtype=torch.float32, device="cpu")
    return numbers.to(device)
