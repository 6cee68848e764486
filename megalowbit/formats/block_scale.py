"""Computes block scales from block maxima: NVFP4's two levels, MX's powers of two, and plain fp32.

Let a be the largest magnitude of a block (already times `q_scalar`), A the largest a of the tensor, and M the
largest element (6 for E2M1). Each operation is rounded to fp32 once, in the order written; all kernels follow
it:

- `e4m3`: S = 448·M/A (1 if A = 0; at most 2¹²⁶, so that 1/S is a normal number); s = e4m3(min(a/(M/S), 448)),
  because a/(M/S) is exact if S is a power of two; element = round(x · (S/s)), decoded as element · s · (1/S).
  With a power-of-two tensor scale, S is rounded down to a power of two, at most 2¹¹⁶. Then decoded numbers
  are multiples of 2⁻¹²⁶ with at most six significant bits: zeros or normal numbers of bf16
- `e8m0`: s = 2^(⌊log₂ a⌋ - ⌊log₂ M⌋), OCP's choice ("down"), or the smallest power of two with M·s ≥ a ("up",
  NVIDIA's); within 2^±127; element = round(x · (1/s))
- `fp32`: s = a/M; element = round(x/s)

E4M3 scales are rounded to nearest even, or "up". With "up" no element saturates. S is then at most 2¹¹⁸, for
which S/s is finite even with the smallest s, so no block underflows. A block with an infinity or a NaN gets
the scale NaN, decodes to NaN and does not enter A. A block too small for the format of its scale gets the
scale 0. `wide_scales` describes UE5M3 and HiF4.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalowbit.formats.block_format import BlockFormat
from megalowbit.formats.element import ElementFormat
from megalowbit.formats.tables import cached_table
from megalowbit.formats.wide_scales import decode_hif4, decode_ue5m3, hif4_scales, ue5m3_scales

E4M3_MAX = 448.0
MAX_ENCODE_SCALE = 2.0**126
MAX_ENCODE_SCALE_UP = 2.0**118  # 2¹²⁷ over E4M3's smallest number
MAX_POWER_OF_TWO = 2.0**116  # 2¹²⁶ times the smallest element · block scale, .5 · 2⁻⁹
EXPONENT_BITS = 0x7F800000  # of fp32
SLACK = 1 + 2.0**-20  # fp32 rounding may raise a ratio that is at most 1 to this
ScaleRounding = Literal["nearest", "up", "down"]


class BlockScales(NamedTuple):
    """The scales of one tensor; all but `tensor_scale` have the shape of the block maxima.

    In HiF4, `decoded` and `encode` have a number for each four elements, and the others one for each block.

    Attributes:
        codes: scales as stored, see `SCALE_DTYPES`; NaN for a block with an infinity or
            NaN.
        decoded: the same numbers in fp32.
        encode: fp32, the factor of elements (the divisor for fp32 scales); 0 or NaN if the block underflows
            or is not finite.
        tensor_scale: fp32, 0-dim: 1/S of two-level scales, (rows, 1) if each row has its own; or the only
            scale of the tensor; otherwise `None`.
        overflows: bool, whether a scale was above the largest of its format before it was clamped: 448 for
            E4M3 (with `SLACK`).
    """

    codes: Tensor
    decoded: Tensor
    encode: Tensor
    tensor_scale: Tensor | None
    overflows: Tensor


def block_scales(
    amax: Tensor,
    format: BlockFormat,
    rounding: ScaleRounding = "nearest",
    tensor_amax: Tensor | None = None,
    scale_max: float = E4M3_MAX,
    is_power_of_two: bool = False,
) -> BlockScales:
    """Scales of the blocks whose largest magnitudes are `amax`.

    Args:
        amax: fp32, at least one block; not finite if the block is not. HiF4: of each four elements.
        format: format of the tensor.
        rounding: rounding of the scale: "nearest" or "up" for E4M3, "down" or "up" for E8M0, "nearest" for
            fp32.
        tensor_amax: fp32, 0-dim: the largest magnitude of the tensor, if these blocks are only a part of it
            (all shards must use the same). `None`: taken from `amax`. If it is not finite, every block
            becomes NaN.
        scale_max: E4M3 scale of the largest block; four-over-six uses 256 to leave headroom.
        is_power_of_two: round the tensor scale of a two-level format up to a power of two.
    """
    amax = torch.where(amax.isfinite(), amax, torch.nan)  # a NaN without sign, so its code is unique
    if format.block is None:
        if tensor_amax is not None:
            amax = torch.where(amax.isnan() | ~tensor_amax.isfinite(), torch.nan, tensor_amax)
        return _one_scale(amax, format.element)
    if format.scale == "e8m0":
        return _power_of_two_scales(amax, format.element, rounding)
    if format.scale in ("ue5m3", "hif4"):
        is_up = rounding == "up"
        is_hif4 = format.scale == "hif4"
        wide = hif4_scales(amax, is_up) if is_hif4 else ue5m3_scales(amax, format.element, is_up)
        return BlockScales(wide.codes, wide.decoded, wide.encode, None, wide.overflows)
    if format.scale == "fp32":
        scale = torch.div(amax, torch.full_like(amax, format.element.max))
        return BlockScales(scale, scale, scale, None, torch.zeros_like(scale, dtype=torch.bool))
    encode_scale = tensor_encode_scale(amax, format, tensor_amax, scale_max, rounding, is_power_of_two)
    return two_level_scales(amax, encode_scale, format.element.max, rounding)


def tensor_encode_scale(
    amax: Tensor,
    format: BlockFormat,
    tensor_amax: Tensor | None,
    scale_max: float = E4M3_MAX,
    rounding: ScaleRounding = "nearest",
    is_power_of_two: bool = False,
) -> Tensor:
    """S, which maps the tensor's largest magnitude to `scale_max` · M: fp32, 0-dim; see `block_scales`.

    NaN if a given `tensor_amax` is not finite. With row scales it is that of each row, (rows, 1), and a given
    maximum is ignored.
    """
    if format.has_row_scales:
        tensor_amax = torch.nan_to_num(amax, nan=0.0).amax(1, keepdim=True)
    elif tensor_amax is None:
        tensor_amax = torch.nan_to_num(amax, nan=0.0).amax()
    # both operands of a division are tensors, because torch turns division by a Python number into a product
    encode_scale = torch.div(torch.full_like(tensor_amax, scale_max * format.element.max), tensor_amax)
    most = MAX_ENCODE_SCALE_UP if rounding == "up" else MAX_ENCODE_SCALE
    if is_power_of_two:  # S is a normal number or infinite, so the mantissa's bits can be cleared
        encode_scale = (encode_scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
        most = MAX_POWER_OF_TWO
    encode_scale = torch.where(tensor_amax > 0, encode_scale.clamp_(max=most), 1.0)
    return torch.where(tensor_amax.isfinite(), encode_scale, torch.nan)


def two_level_scales(
    amax: Tensor, encode_scale: Tensor, element_max: float, rounding: ScaleRounding
) -> BlockScales:
    """E4M3 block scales, for a tensor scale of 1/S.

    Args:
        amax: fp32 block maxima, NaN for a block with an infinity or NaN.
        encode_scale: S, fp32, 0-dim, or (rows, 1).
        element_max: the element that a block's maximum is mapped to: M, or 4 in four-over-six.
        rounding: "nearest" or "up".
    """
    unclamped = torch.div(amax, torch.div(torch.full_like(encode_scale, element_max), encode_scale))
    clamped = unclamped.clamp(max=E4M3_MAX)
    codes = clamped.to(torch.float8_e4m3fn)
    if rounding == "up":
        is_low = codes.to(torch.float32) < clamped
        codes = (codes.view(torch.uint8) + is_low).view(torch.float8_e4m3fn)
    decoded = codes.to(torch.float32)
    encode = torch.div(encode_scale, decoded).nan_to_num_(nan=0.0, posinf=0.0)
    return BlockScales(codes, decoded, encode, torch.reciprocal(encode_scale), unclamped > E4M3_MAX * SLACK)


def _power_of_two_scales(amax: Tensor, element: ElementFormat, rounding: ScaleRounding) -> BlockScales:
    mantissa, exponent = math.frexp(element.max)  # 6 = 0.75 · 2³
    bits = amax.view(torch.int32)
    code = (bits >> 23) - (exponent - 1)
    if rounding == "up":
        limit = int((mantissa * 2 - 1) * 2**23)  # mantissa bits of 1.5
        code = code + ((bits & 0x7FFFFF) > limit)
    code = torch.where(amax.isnan(), 255, code.clamp(0, 254)).to(torch.uint8)
    codes = code.view(torch.float8_e8m0fnu)
    decoded = decode_e8m0(codes)
    encode = torch.reciprocal(decoded).nan_to_num_(nan=0.0)
    return BlockScales(codes, decoded, encode, None, torch.zeros_like(code, dtype=torch.bool))


def _one_scale(amax: Tensor, element: ElementFormat) -> BlockScales:
    scale = torch.div(amax, torch.full_like(amax, element.max))
    one = torch.ones_like(scale)
    return BlockScales(one, one, scale, scale.view(()), torch.zeros_like(scale, dtype=torch.bool))


@cached_table
def _powers_of_two(device: torch.device) -> Tensor:
    # ldexp on the host, because 2^-127 is subnormal and exp2 of some devices flushes it to zero
    powers = [math.ldexp(1.0, code - 127) for code in range(255)]
    return torch.tensor([*powers, math.nan], dtype=torch.float32, device="cpu").to(device)


def decode_e8m0(codes: Tensor) -> Tensor:
    """E8M0 numbers as fp32; 255 is NaN."""
    return _powers_of_two(codes.device)[codes.view(torch.uint8).to(torch.int32)]


def decode_scales(codes: Tensor) -> Tensor:
    """Stored block scales as fp32, one for each `BlockFormat.scale_block`."""
    decode = _DECODERS.get(codes.dtype)
    return codes.to(torch.float32) if decode is None else decode(codes)


_DECODERS = {torch.float8_e8m0fnu: decode_e8m0, torch.uint8: decode_ue5m3, torch.int32: decode_hif4}
