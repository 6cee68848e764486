"""Numbers for the Triton kernels: scales of blocks, E2M1, and their bits, each operation rounded once.

Nearest rounding adds 2²³: y·2 + 2²³, y + (2 + 2²³) and y/2 + (4 + 2²³), each rounded once, hold the code in
their low bits where its straight piece applies, and the least of the three is the right one.
"""

from __future__ import annotations

import triton
import triton.language as tl

SIGN = tl.constexpr(-0x80000000)
NAN_BITS = tl.constexpr(0x7FC00000)
INFINITY = tl.constexpr(float("inf"))
INTEGERS = tl.constexpr(2.0**23)  # fp32 numbers from here on are integers
ELEMENT_MAX = tl.constexpr(6.0)
E4M3_MAX = tl.constexpr(448.0)
E4M3_NAN = tl.constexpr(0x7F)
E8M0_NAN = tl.constexpr(0xFF)
SLACK = tl.constexpr(1 + 2.0**-20)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(number):
    return number.to(tl.int32, bitcast=True)


@triton.jit
def _divide(a, b):
    return tl.math.div_rn(a, b)


@triton.jit
def _constant(number: tl.constexpr):
    return tl.full((), number, tl.float32)


@triton.jit
def _round_to_fp8(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Nearest even, codes without sign; `value` lies between 0 and the format's maximum."""
    bits = _bits(value)
    dropped: tl.constexpr = 23 - MANTISSA
    odd = (bits >> dropped) & 1
    normal = ((bits + ((1 << (dropped - 1)) - 1) + odd) >> dropped) - ((127 - BIAS) << MANTISSA)
    ulp_is_last_place: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)  # adding it rounds a subnormal
    ulp_bits: tl.constexpr = (1 - BIAS - MANTISSA + 23 + 127) << 23
    subnormal = _bits(value + ulp_is_last_place) - ulp_bits
    smallest_normal: tl.constexpr = 2.0 ** (1 - BIAS)
    return tl.where(value < smallest_normal, subnormal, normal)


@triton.jit
def _decode_scale(code, SCALE: tl.constexpr):
    """fp32 of stored block scales (int32); NaN for NaN."""
    if SCALE == "e4m3":
        # Exponent and mantissa land at the bottom of fp32's range: subnormals included, exact.
        decoded = _float(code << 20) * 2.0**120
        return tl.where(code == E4M3_NAN, _float(tl.full(code.shape, NAN_BITS, tl.int32)), decoded)
    bits = tl.where(code == 0, 1 << 22, code << 23)
    return _float(tl.where(code == E8M0_NAN, NAN_BITS, bits))


@triton.jit
def _element(code):
    """E2M1 numbers of codes; the same trick as for E4M3."""
    return _float(((code & 7) << 22) | ((code << 28) & SIGN)) * 2.0**126


@triton.jit
def _encode_scale(amax, SCALE_MAX: tl.constexpr, IS_UP: tl.constexpr, IS_POWER_OF_TWO: tl.constexpr):
    """S, see `formats.block_scale`."""
    most: tl.constexpr = 2.0**118 if IS_UP else 2.0**126
    encode = _divide(_constant(SCALE_MAX * ELEMENT_MAX), amax)
    if IS_POWER_OF_TWO:
        encode = _float(_bits(encode) & 0x7F800000)  # rounded down
        encode = tl.minimum(encode, 2.0**116)
    encode = tl.minimum(encode, most)
    encode = tl.where(amax > 0, encode, 1.0)
    return tl.where(tl.abs(amax) < INFINITY, encode, _float(tl.full((), NAN_BITS, tl.int32)))


@triton.jit
def _two_level(amax, encode_scale, MAX: tl.constexpr, IS_UP: tl.constexpr):
    """Stored and decoded scale, encode factor and saturation of blocks, see `formats.block_scale`."""
    unclamped = _divide(amax, _divide(_constant(MAX), encode_scale))
    clamped = tl.minimum(unclamped, E4M3_MAX)
    code = _round_to_fp8(clamped, 3, 7)
    if IS_UP:
        code += (_decode_scale(code, "e4m3") < clamped).to(tl.int32)
    is_finite = (amax < INFINITY) & (unclamped >= 0)  # NaN under a tensor's scale of NaN
    code = tl.where(is_finite, code, E4M3_NAN)
    decoded = _decode_scale(code, "e4m3")
    encode = _divide(encode_scale, decoded)
    encode = tl.where(encode < INFINITY, encode, 0.0)
    return code, decoded, encode, is_finite & (unclamped > E4M3_MAX * SLACK)


@triton.jit
def _power_of_two(amax, IS_UP: tl.constexpr):
    """As `_two_level`, with E8M0 scales: an exponent is two below that of the maximum, as 6 = 1.5 · 2²."""
    bits = _bits(amax)
    code = (bits >> 23) - 2
    if IS_UP:
        code += ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)
    is_finite = amax < INFINITY
    code = tl.where(is_finite, tl.maximum(code, 0), E8M0_NAN)
    encode = _float(tl.where(is_finite, (254 - code) << 23, 0))
    return code, _decode_scale(code, "e8m0"), encode, amax < 0  # never beyond the format


@triton.jit
def _nearest(scaled):
    """Codes of nearest-even rounding (int32), see the top of this file."""
    magnitude = tl.minimum(tl.abs(scaled), ELEMENT_MAX)
    by_half = tl.fma(magnitude, 2.0, INTEGERS)
    by_one = magnitude + (INTEGERS + 2)
    by_two = tl.fma(magnitude, 0.5, INTEGERS + 4)
    code = _bits(tl.minimum(tl.minimum(by_half, by_one), by_two))
    return (code & 7) | ((_bits(scaled) >> 28) & 8)
