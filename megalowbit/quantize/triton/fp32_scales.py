"""Triton kernels for INT8, INT4 and small floats with fp32 scales; launched by `launch_fp32_scales`.

Tiles, loading, random numbers, counting and a tensor's maximum are as in `triton.fp4`. A tensor with one
scale is read twice: for its maximum and for the codes. If the maximum is given, it is read once, and a second
time only if it contains an infinity or a NaN. Block-scaled tensors are read once. Mixed blocks are rounded to
INT8 first, and those codes decide; if a tile has an E5M2 block, the whole tile is also rounded to E5M2.

An element format is given by the bits of a code and of its mantissa (0 for integers), the largest code and
the largest number. Every operation is rounded once, in the order of `reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megalowbit.quantize.triton.decode import _load_words, _word_tile
from megalowbit.quantize.triton.fp4 import (
    GROUP,
    _block_maxima,
    _drawn,
    _expand,
    _load,
    _raise,
    _random_fractions,
    _stepped,
    _store_codes,
    _store_counts,
    _store_values,
    _tile,
    _tile_of_blocks,
)
from megalowbit.quantize.triton.numbers import (
    INFINITY,
    INTEGERS,
    NAN_BITS,
    SIGN,
    _bits,
    _constant,
    _divide,
    _float,
)

INTEGERS_BITS = tl.constexpr(0x4B000000)
INT8_MAX = tl.constexpr(127.0)
E5M2_MAX = tl.constexpr(57344.0)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
NUMERATOR = tl.constexpr(141)  # see `mixed_blocks`
DENOMINATOR = tl.constexpr(32)


@triton.jit
def _codes(
    quotient, fraction, IS_STOCHASTIC: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, LARGEST:
    tl.constexpr,
):  # fmt: skip
    """Codes without sign (int32) of numbers already divided by their scale, see `formats.codes`.

    `fraction` is a random number below 2²⁴, used for stochastic rounding.
    """
    magnitude = tl.minimum(tl.abs(quotient), LARGEST)
    if MANTISSA == 0:
        if IS_STOCHASTIC:
            code = _stepped(magnitude * 2.0**24, fraction)
        else:
            code = _bits(magnitude + INTEGERS) - INTEGERS_BITS
    else:
        dropped: tl.constexpr = 23 - MANTISSA
        least: tl.constexpr = (129 - (1 << (BITS - 2 - MANTISSA))) << 23  # normal number, by its bits
        exponent = tl.maximum(_bits(magnitude) & 0x7F800000, least)
        below = (exponent - least) >> dropped  # codes below the number's own binade
        if IS_STOCHASTIC:
            position = magnitude * _float((254 << 23) - (exponent - (MANTISSA << 23)))
            # added binade by binade, the order of the definition, because the sums are rounded
            rest = below.to(tl.float32)
            for i in tl.static_range(BITS - 2 - MANTISSA):
                part = tl.minimum(rest, 2.0 ** (MANTISSA + 1 + i))
                position += part
                rest -= part
            code = _stepped(position * 2.0**24, fraction)
        else:
            # a number whose fp32 spacing equals the format's spacing around `magnitude`
            wide = exponent + (dropped << 23)
            code = _bits(magnitude + _float(wide)) - wide + below
    return code


@triton.jit
def _values(code, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Numbers of codes with their sign; higher bits are ignored."""
    magnitude = code & ((1 << (BITS - 1)) - 1)
    if MANTISSA == 0:
        number = magnitude.to(tl.float32)
    else:
        # place exponent and mantissa at the bottom of fp32's range, where subnormals are exact too
        number = _float(magnitude << (23 - MANTISSA)) * 2.0 ** (128 - (1 << (BITS - 2 - MANTISSA)))
    return _float(_bits(number) | ((code << (32 - BITS)) & SIGN))


@triton.jit
def _not_a_number():
    return _float(tl.full((), NAN_BITS, tl.int32))


@triton.jit
def _defined(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr):
    """Numbers of any codes: NaN for those that the format does not use."""
    values = _values(code, BITS, MANTISSA)
    if TOP < (1 << (BITS - 1)) - 1:
        values = tl.where((code & ((1 << (BITS - 1)) - 1)) > TOP, _not_a_number(), values)
    return values


@triton.jit
def _rounded(number, DTYPE: tl.constexpr, SCALE: tl.constexpr):
    """fp32 whose upper half is the nearest bf16 number, where that is what is stored; without scale it is."""
    if DTYPE == "bf16" and SCALE != "one":
        bits = _bits(number)
        bits = tl.where(number == number, bits + 0x7FFF + ((bits >> 16) & 1), NAN_BITS)
        number = _float(bits)
    return number


@triton.jit
def _with_sign(code, quotient, BITS: tl.constexpr):
    return code | ((_bits(quotient) >> (32 - BITS)) & (1 << (BITS - 1)))


@triton.jit
def _scale_of(amax, LARGEST: tl.constexpr):
    """The maximum over the largest element; NaN, its sign bit clear, where `amax` is not finite."""
    return tl.where(tl.abs(amax) < INFINITY, _divide(amax, _constant(LARGEST)), _not_a_number())


@triton.jit
def _mixed(
    values, maxima, fraction, block_col, cols, IS_STOCHASTIC: tl.constexpr, BLOCK_COLS: tl.constexpr
):  # fmt: skip
    """Signed scales of blocks, elements over their scale, and codes, see `mixed_blocks`."""
    R: tl.constexpr = values.shape[0]
    G: tl.constexpr = values.shape[1]
    int8_scale, e5m2_scale = _scale_of(maxima, INT8_MAX), _scale_of(maxima, E5M2_MAX)
    int8_scale = tl.where(int8_scale == 0, 1.0, int8_scale)
    quotient = _divide(values, _expand(int8_scale, R, G)[:, :, None])
    code = _codes(quotient, fraction, False, 8, 0, INT8_MAX)
    sums = tl.sum(code, axis=2).reshape(R, G // (BLOCK_COLS // GROUP), BLOCK_COLS // GROUP)
    others = tl.minimum(cols - block_col * BLOCK_COLS, BLOCK_COLS)[None, :] - 1  # without the largest
    is_small = (tl.sum(sums, axis=2) - 127) * DENOMINATOR < NUMERATOR * others
    is_e5m2 = is_small & (e5m2_scale >= SMALLEST_NORMAL)  # False for NaN
    scale = tl.where(is_e5m2, -e5m2_scale, int8_scale)
    if IS_STOCHASTIC:
        code = _codes(quotient, fraction, True, 8, 0, INT8_MAX)
    if tl.max(tl.max(is_e5m2.to(tl.int32), axis=1), axis=0) > 0:
        factor = _expand(scale, R, G)[:, :, None]
        quotient = _divide(values, tl.abs(factor))  # unchanged for INT8
        e5m2_code = _codes(quotient, fraction, IS_STOCHASTIC, 8, 2, E5M2_MAX)
        code = tl.where(_bits(factor) < 0, e5m2_code, code)
    return scale, quotient, _with_sign(code, quotient, 8)


@triton.jit
def _restored(code, factor, SCALE: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Codes × block scale, without the tensor's only scale."""
    if SCALE == "signed_fp32":
        values = tl.where(_bits(factor) < 0, _values(code, 8, 2), _values(code, 8, 0)) * tl.abs(factor)
    elif SCALE == "fp32":
        values = _values(code, BITS, MANTISSA) * factor
    else:
        values = _values(code & tl.where(factor == factor, -1, 0), BITS, MANTISSA)
    return values


@triton.jit(do_not_specialize=["signs", "key_low", "key_high", "lag"])
def encode_kernel(
    x, amax, largest, codes, scales, operand, counts, errors, rows, cols, row_stride, col_stride, q_scalar,
    signs, key_low, key_high, step, lag, DTYPE: tl.constexpr, BITS: tl.constexpr, MANTISSA:
    tl.constexpr, LARGEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS:
    tl.constexpr, SCALE: tl.constexpr, MAXIMUM: tl.constexpr, IS_STOCHASTIC: tl.constexpr, HAS_SIGNS:
    tl.constexpr, OPERAND: tl.constexpr, HAS_COUNTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_GROUPS:
    tl.constexpr,
):  # fmt: skip
    """Everything of `reference.encode` but the tensor's maximum, from one read of x.

    `codes` are int32 words, `scales` fp32 (that of the tensor where `SCALE` is "one"), a bf16 `operand` is
    int16; `counts` (programs, 8) int32 and `errors` (programs, 2) fp64 hold one row a program. `OPERAND` is
    "none", "bf16", "fp16" or "fp32". One scale follows from `amax`: where that was "given", `largest` is
    raised on the way, as by `amax_kernel`; a second launch then has `largest` for `amax` and does everything
    again if that is "spoiled".
    """
    if MAXIMUM == "spoiled":  # noqa: SIM102 -- known when compiling: else nothing is loaded
        if tl.load(amax) < INFINITY:
            return
    row, group, groups = _tile(cols, BLOCK_COLS, TILE_ROWS, TILE_GROUPS)
    values = _load(x, row, group, rows, cols, row_stride, col_stride, signs, DTYPE, HAS_SIGNS)
    maxima = _block_maxima(values, q_scalar, BLOCK_ROWS, BLOCK_COLS)
    block_row, block_col = _tile_of_blocks(cols, BLOCK_ROWS, BLOCK_COLS, TILE_ROWS, TILE_GROUPS)
    block_cols = groups // (BLOCK_COLS // GROUP)
    is_block = (block_row[:, None] < tl.cdiv(rows, BLOCK_ROWS)) & (block_col[None, :] < block_cols)
    fraction = 0
    if IS_STOCHASTIC:
        low, high, now = _drawn(key_low, key_high, step, lag)
        fraction = _random_fractions(row, group, groups, low, high, now)
    if SCALE == "one":
        scale = _scale_of(tl.load(amax), LARGEST)
        if MAXIMUM == "given":
            _raise(largest, maxima)
        if tl.program_id(0) == 0:
            tl.store(scales, scale)
        factor = tl.full((1, 1, 1), 0.0, tl.float32) + scale
    elif SCALE == "fp32":
        scale = _scale_of(maxima, LARGEST)
        factor = _expand(scale, TILE_ROWS, TILE_GROUPS)[:, :, None]
    if SCALE == "signed_fp32":
        scale, quotient, code = _mixed(values, maxima, fraction, block_col, cols, IS_STOCHASTIC, BLOCK_COLS)
        factor = _expand(scale, TILE_ROWS, TILE_GROUPS)[:, :, None]
    else:
        # with a scale of 0, all quotients must be 0
        quotient = _divide(values, tl.where(factor == 0, INFINITY, factor))
        code = _codes(quotient, fraction, IS_STOCHASTIC, BITS, MANTISSA, LARGEST)
        code = _with_sign(code, quotient, BITS)
    _store_codes(code, factor == factor, codes, row, group, rows, groups, BITS)
    if SCALE != "one":
        offset = block_row[:, None].to(tl.int64) * block_cols + block_col[None, :]
        tl.store(scales + offset, scale, mask=is_block)
    if OPERAND != "none" or HAS_COUNTS:
        restored = _restored(code, factor, SCALE, BITS, MANTISSA)
        col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        if OPERAND != "none":
            _store_values(_rounded(restored, OPERAND, SCALE), operand, row, col, rows, cols, cols, 1, OPERAND)
        if HAS_COUNTS:
            largest_element = LARGEST
            if SCALE == "signed_fp32":
                largest_element = tl.where(_bits(factor) < 0, E5M2_MAX, INT8_MAX)
            is_inside = (row[:, None, None] < rows) & (col[None, :, :] < cols)
            overflows = maxima < 0  # never: fp32 scales have the range of the numbers
            if SCALE == "one":  # there is one block, which the first program counts
                is_block = tl.full((1, 1), 0, tl.int32) == tl.program_id(0)
                is_zero_block = tl.full((1, 1), 0.0, tl.float32) + scale == 0
                overflows = is_block != is_block
            else:
                is_zero_block = (scale == 0) if SCALE == "fp32" else (maxima == 0)
            _store_counts(
                counts, errors, values, quotient, restored, scale if SCALE == "one" else 1.0, largest_element,
                is_inside, overflows, is_zero_block, is_block,
            )  # fmt: skip


@triton.jit
def decode_kernel(
    codes, scales, out, rows, cols, words, row_stride, col_stride, DTYPE: tl.constexpr, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, TOP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, SCALE:
    tl.constexpr, TILE_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """`reference.decode`: `codes` (rows, words) int32, `scales` fp32, `out` int16 where it is bf16."""
    CODES: tl.constexpr = 32 // BITS
    row, word = _word_tile(words, TILE_ROWS, TILE_WORDS)
    loaded = _load_words(codes, row, word, rows, words)
    code = loaded[:, :, None] >> (tl.arange(0, CODES) * BITS)[None, None, :]
    if SCALE == "one":
        values = _defined(code, BITS, MANTISSA, TOP)
    else:
        block_cols = words // (BLOCK_COLS // CODES)
        block_row, block_col = row // BLOCK_ROWS, word // (BLOCK_COLS // CODES)
        offset = block_row[:, None].to(tl.int64) * block_cols + block_col[None, :]
        is_inside = (row[:, None] < rows) & (word[None, :] < words)
        factor = tl.load(scales + offset, mask=is_inside, other=0)[:, :, None]
        values = _defined(code, BITS, MANTISSA, TOP)
        if SCALE == "signed_fp32":
            values = tl.where(_bits(factor) < 0, _defined(code, 8, 2, 123), values)
            factor = tl.abs(factor)
        values = _rounded(values * factor, DTYPE, SCALE)
    col = word[:, None] * CODES + tl.arange(0, CODES)[None, :]
    _store_values(values, out, row, col, rows, cols, row_stride, col_stride, DTYPE)
