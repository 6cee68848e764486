"""Triton kernels for products of MXFP4 matrices on FP8 tensor cores; launched by `launch_fp8`.

`decode_kernel` writes a matrix as FP8 numbers: the distance of a block's exponent from the highest one moves
into the element. That is exact within FP8's range of exponents, and undefined outside.

`product_kernel` runs after each FP8 product. It reads the exponents of both matrices. If they fit, it ends
without touching the product. Otherwise it computes the product from the codes, as bf16 numbers summed in
fp32, and overwrites it. So the host need not know which of them it was.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megalowbit.quantize.triton.decode import _load_scales, _load_words, _unpack, _word_tile
from megalowbit.quantize.triton.fp4 import _store_values
from megalowbit.quantize.triton.numbers import E8M0_NAN, _bits, _element, _float

CODES = tl.constexpr(8)  # codes per word
BLOCK_WORDS = tl.constexpr(4)  # words per MXFP4 block
BIAS = tl.constexpr(127)  # of E8M0 and of fp32
HIGHEST = tl.constexpr(127 + 125)  # above it, an element may be infinite in bf16


@triton.jit
def _load_exponents(scales, row, block, rows, blocks):
    """Exponent codes of a tile's blocks (int32); NaN's code outside of the matrix."""
    offset = row[:, None].to(tl.int64) * blocks + block[None, :]
    is_inside = (row[:, None] < rows) & (block[None, :] < blocks)
    return tl.load(scales + offset, mask=is_inside, other=E8M0_NAN).to(tl.int32)


@triton.jit
def _fp8_factors(exponent, highest, SHIFT: tl.constexpr, REACH: tl.constexpr, FP8_BIAS: tl.constexpr):
    """What `_fp8` multiplies elements by, for each block."""
    distance = tl.minimum(tl.maximum(exponent - highest, -REACH), 0)
    return _float((distance + (SHIFT + FP8_BIAS - 1 + BIAS)) << 23)


@triton.jit
def _fp8(code, factor, is_nan, MANTISSA: tl.constexpr):
    """FP8 bytes of E2M1 codes (int32, bits above the fourth are ignored).

    A code's exponent and mantissa at the bottom of fp32's range are element · 2⁻¹²⁶. The factor is
    2^(126 + distance + SHIFT) times 2^(FP8_BIAS - 127). With that, fp32's bits begin with those of FP8,
    subnormals included.
    """
    number = _float((code & 7) << 22) * factor
    byte = (_bits(number) >> (23 - MANTISSA)) | ((code & 8) << 4)
    return tl.where(is_nan, 0x7F, byte)


@triton.jit
def decode_kernel(
    codes, scales, exponents, out, out_scale, rows, cols, words, row_stride, col_stride, MANTISSA:
    tl.constexpr, FP8_BIAS: tl.constexpr, SHIFT: tl.constexpr, REACH: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """`backends.decode_fp8`: `codes` (rows, words) int32, `scales` and `out` bytes."""
    row, word = _word_tile(words, TILE_ROWS, TILE_WORDS)
    loaded = _load_words(codes, row, word, rows, words)
    start = (tl.program_id(0) % tl.cdiv(words, TILE_WORDS)) * (TILE_WORDS // BLOCK_WORDS)
    block = start + tl.arange(0, TILE_WORDS // BLOCK_WORDS)
    exponent = _load_exponents(scales, row, block, rows, words // BLOCK_WORDS)
    highest = tl.load(exponents)
    if tl.program_id(0) == 0:
        power = tl.where(highest < 0, BIAS, highest - SHIFT)
        tl.store(out_scale, _float(tl.minimum(tl.maximum(power, 1), 254) << 23))

    R: tl.constexpr = loaded.shape[0]
    W: tl.constexpr = loaded.shape[1]
    shape: tl.constexpr = (R, W // BLOCK_WORDS, BLOCK_WORDS)
    factor = _fp8_factors(exponent, highest, SHIFT, REACH, FP8_BIAS)
    factor = tl.broadcast_to(factor[:, :, None], shape).reshape(R, W)
    is_nan = tl.broadcast_to((exponent == E8M0_NAN)[:, :, None], shape).reshape(R, W)
    byte = _fp8(_unpack(loaded), factor[:, :, None], is_nan[:, :, None], MANTISSA)
    col = word[:, None] * CODES + tl.arange(0, CODES)[None, :]
    _store_values(byte.to(tl.uint8), out, row, col, rows, cols, row_stride, col_stride, "fp8")


@triton.jit
def _end(exponents, SHIFT: tl.constexpr):
    """Exponent of the scale of a matrix's FP8 numbers; 0 if it has no block that counts."""
    highest = tl.load(exponents)
    return tl.where(highest < 0, 0, highest - (BIAS + SHIFT))


@triton.jit
def _is_within(exponents, REACH: tl.constexpr):
    """Whether all blocks of a matrix are exact in FP8, and finite in bf16."""
    highest, lowest = tl.load(exponents), -tl.load(exponents + 1)
    return (highest < 0) | ((highest - lowest <= REACH) & (highest <= HIGHEST))


@triton.jit
def _fits(
    left, right, LEFT_SHIFT: tl.constexpr, LEFT_REACH: tl.constexpr, RIGHT_SHIFT: tl.constexpr,
    RIGHT_REACH: tl.constexpr,
):  # fmt: skip
    """Whether an FP8 product of matrices with these exponents is exact; `layers.matmul.fp8` has the rules."""
    left_end, right_end = _end(left, LEFT_SHIFT), _end(right, RIGHT_SHIFT)
    both = left_end + right_end
    lowest = tl.minimum(tl.minimum(left_end, right_end), both)
    highest = tl.maximum(tl.maximum(left_end, right_end), both)
    is_normal = (lowest >= -126) & (highest <= 127)
    return is_normal & _is_within(left, LEFT_REACH) & _is_within(right, RIGHT_REACH)


@triton.jit
def _numbers(codes, scales, row, word, rows, words, IS_WIDE: tl.constexpr):
    """(rows, 8 · words) numbers of a tile: bf16, or fp32 where a product of bf16 tiles is not supported."""
    factor = _load_scales(scales, row, word, rows, words, 1, 32, "e8m0")
    values = _element(_unpack(_load_words(codes, row, word, rows, words))) * factor[:, :, None]
    values = values.reshape(row.shape[0], word.shape[0] * CODES)
    return values if IS_WIDE else values.to(tl.bfloat16)


@triton.jit
def _tile(
    codes, scales, outer, inner, outer_size, inner_size, IS_TRANSPOSED: tl.constexpr,
    TILE_OUTER: tl.constexpr, TILE_INNER: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """A tile (outer, inner) of a matrix that is stored as such, or as its transpose; zeros outside.

    `outer` and `inner` are the first numbers of row and column.
    """
    if IS_TRANSPOSED:
        row = inner + tl.arange(0, TILE_INNER)
        word = outer // CODES + tl.arange(0, TILE_OUTER // CODES)
        words = tl.cdiv(outer_size, CODES * BLOCK_WORDS) * BLOCK_WORDS
        return tl.trans(_numbers(codes, scales, row, word, inner_size, words, IS_WIDE))
    row = outer + tl.arange(0, TILE_OUTER)
    word = inner // CODES + tl.arange(0, TILE_INNER // CODES)
    words = tl.cdiv(inner_size, CODES * BLOCK_WORDS) * BLOCK_WORDS
    return _numbers(codes, scales, row, word, outer_size, words, IS_WIDE)


@triton.jit
def _rounded_to_bf16(numbers):
    """fp32 rounded to nearest even, as int16 bits; the interpreter's conversion would truncate."""
    bits = _bits(numbers)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return tl.where(numbers == numbers, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def product_kernel(
    out, left_codes, left_scales, left_exponents, right_codes, right_scales, right_exponents, counts, m, n,
    k, LEFT_SHIFT: tl.constexpr, LEFT_REACH: tl.constexpr, RIGHT_SHIFT: tl.constexpr, RIGHT_REACH:
    tl.constexpr, LEFT_TRANSPOSED: tl.constexpr, RIGHT_TRANSPOSED: tl.constexpr, IS_WIDE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Overwrite `out` (m, n) with left (m, k) · right (k, n) if that does not fit FP8; count it if so.

    A transposed operand is stored as (k, m) or (n, k). Codes are int32 words, a bf16 `out` is int16, and
    `counts` are int32: products, and those overwritten.
    """
    fits = _fits(left_exponents, right_exponents, LEFT_SHIFT, LEFT_REACH, RIGHT_SHIFT, RIGHT_REACH)
    program = tl.program_id(0)
    tl.atomic_add(counts, 1, mask=program == 0)
    tl.atomic_add(counts + 1, 1, mask=(program == 0) & (fits == 0))
    tiles_n = tl.cdiv(n, TILE_N)
    tiles = tl.where(fits, 0, tl.cdiv(m, TILE_M) * tiles_n)
    for tile in range(program, tiles, tl.num_programs(0)):
        start_m, start_n = (tile // tiles_n) * TILE_M, (tile % tiles_n) * TILE_N
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for start_k in range(0, k, TILE_K):
            a = _tile(
                left_codes, left_scales, start_m, start_k, m, k, LEFT_TRANSPOSED, TILE_M, TILE_K, IS_WIDE
            )
            b = _tile(
                right_codes, right_scales, start_k, start_n, k, n, RIGHT_TRANSPOSED, TILE_K, TILE_N, IS_WIDE
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        row, col = start_m + tl.arange(0, TILE_M), start_n + tl.arange(0, TILE_N)
        offset = row[:, None].to(tl.int64) * n + col[None, :]
        is_inside = (row[:, None] < m) & (col[None, :] < n)
        if out.dtype.element_ty == tl.int16:
            tl.store(out + offset, _rounded_to_bf16(total), mask=is_inside)
        else:
            tl.store(out + offset, total.to(out.dtype.element_ty), mask=is_inside)
