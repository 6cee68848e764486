"""Triton kernels that decode FP4 codes to bf16, fp32 or FP8; launched by `launch_fp4`.

A program decodes a tile of (rows, words), a word being eight codes, and writes the numbers with any strides,
so the transposed matrix needs no second pass. FP8 is for MXFP4 on GPUs that multiply FP8 but not FP4: the
difference between a block's exponent and the largest one moves into the element, exactly, within FP8's range
of exponents.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megalowbit.quantize.triton.fp4 import _store_values
from megalowbit.quantize.triton.numbers import (
    E8M0_NAN,
    _decode_scale,
    _element,
    _float,
    _round_to_fp8,
)

CODES = tl.constexpr(8)  # codes per word
BLOCK_WORDS = tl.constexpr(4)  # words per MXFP4 block


@triton.jit
def _word_tile(words, TILE_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr):
    """This program's row numbers and word numbers."""
    tiles = tl.cdiv(words, TILE_WORDS)
    program = tl.program_id(0)
    row = (program // tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    return row, (program % tiles) * TILE_WORDS + tl.arange(0, TILE_WORDS)


@triton.jit
def _load_words(codes, row, word, rows, words):
    offset = row[:, None].to(tl.int64) * words + word[None, :]
    return tl.load(codes + offset, mask=(row[:, None] < rows) & (word[None, :] < words), other=0)


@triton.jit
def _unpack(words):
    """(rows, words, 8) codes; bits above the fourth are not cleared."""
    return words[:, :, None] >> (tl.arange(0, CODES) * 4)[None, None, :]


@triton.jit
def decode_kernel(
    codes, scales, tensor_scale, out, rows, cols, words, row_stride, col_stride, DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, SCALE: tl.constexpr, HAS_TENSOR_SCALE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """`reference.decode`: `codes` (rows, words) int32, `scales` bytes, `out` is int16 if it is bf16."""
    row, word = _word_tile(words, TILE_ROWS, TILE_WORDS)
    loaded = _load_words(codes, row, word, rows, words)
    block_row, block_col = row // BLOCK_ROWS, word // (BLOCK_COLS // CODES)
    offset = block_row[:, None].to(tl.int64) * (words // (BLOCK_COLS // CODES)) + block_col[None, :]
    is_inside = (row[:, None] < rows) & (word[None, :] < words)
    factor = _decode_scale(tl.load(scales + offset, mask=is_inside, other=0).to(tl.int32), SCALE)
    if HAS_TENSOR_SCALE:
        factor *= tl.load(tensor_scale)
    values = _element(_unpack(loaded)) * factor[:, :, None]
    col = word[:, None] * CODES + tl.arange(0, CODES)[None, :]
    _store_values(values, out, row, col, rows, cols, row_stride, col_stride, DTYPE)


@triton.jit
def _load_blocks(scales, row, block, rows, blocks):
    """Scale exponents of a tile (int32); NaN code outside of the matrix."""
    offset = row[:, None].to(tl.int64) * blocks + block[None, :]
    is_inside = (row[:, None] < rows) & (block[None, :] < blocks)
    return tl.load(scales + offset, mask=is_inside, other=E8M0_NAN).to(tl.int32)


@triton.jit
def _is_counted(loaded, exponent):
    """Whether a block has an element that is neither 0 nor NaN."""
    R: tl.constexpr = loaded.shape[0]
    W: tl.constexpr = loaded.shape[1]
    magnitudes = (loaded & 0x77777777).reshape(R, W // BLOCK_WORDS, BLOCK_WORDS)
    return (tl.max(magnitudes, axis=2) > 0) & (exponent != E8M0_NAN)


@triton.jit
def exponent_kernel(
    codes,
    scales,
    largest,
    rows,
    words,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Raise `largest` (int32, -1 before) to the largest exponent of blocks that count."""
    row, word = _word_tile(words, TILE_ROWS, TILE_WORDS)
    block = (tl.program_id(0) % tl.cdiv(words, TILE_WORDS)) * (TILE_WORDS // BLOCK_WORDS)
    block += tl.arange(0, TILE_WORDS // BLOCK_WORDS)
    exponent = _load_blocks(scales, row, block, rows, words // BLOCK_WORDS)
    is_counted = _is_counted(_load_words(codes, row, word, rows, words), exponent)
    maxima = tl.max(tl.where(is_counted, exponent, -1), axis=1)
    tl.atomic_max(largest, tl.max(maxima, axis=0))


@triton.jit
def _power(exponent):
    """2^exponent in fp32 for -149 to 127, below that 0."""
    subnormal = tl.where(exponent >= -149, 1 << tl.maximum(exponent + 149, 0), 0)
    return _float(tl.where(exponent >= -126, (exponent + 127) << 23, subnormal))


@triton.jit
def fp8_kernel(
    codes, scales, largest, out, out_scale, inexact, rows, cols, words, row_stride, col_stride, MANTISSA:
    tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr, REACH: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """`out` as bytes: element · 2^(exponent - largest + SHIFT); counts blocks beyond REACH."""
    row, word = _word_tile(words, TILE_ROWS, TILE_WORDS)
    loaded = _load_words(codes, row, word, rows, words)
    start = (tl.program_id(0) % tl.cdiv(words, TILE_WORDS)) * (TILE_WORDS // BLOCK_WORDS)
    block = start + tl.arange(0, TILE_WORDS // BLOCK_WORDS)
    exponent = _load_blocks(scales, row, block, rows, words // BLOCK_WORDS)
    top = tl.load(largest)
    top = tl.where(top < 0, 127 + SHIFT, top)  # only zeros and NaN: any scale is correct; use 1
    distance = exponent - top
    is_out_of_reach = _is_counted(loaded, exponent) & (distance < -REACH)
    tl.atomic_add(inexact, tl.sum(is_out_of_reach.to(tl.int32)))
    if tl.program_id(0) == 0:
        tl.store(out_scale, _power(top - 127 - SHIFT))

    R: tl.constexpr = loaded.shape[0]
    W: tl.constexpr = loaded.shape[1]
    factor = tl.where(exponent == E8M0_NAN, 0.0, _power(tl.minimum(distance, 0) + SHIFT))
    shape: tl.constexpr = (R, W // BLOCK_WORDS, BLOCK_WORDS)
    factor = tl.broadcast_to(factor[:, :, None], shape).reshape(R, W)
    is_nan = tl.broadcast_to((exponent == E8M0_NAN)[:, :, None], shape).reshape(R, W)
    code = _unpack(loaded)
    byte = _round_to_fp8(_element(code & 7) * factor[:, :, None], MANTISSA, BIAS)
    byte = tl.where(is_nan[:, :, None], 0x7F, byte | ((code & 8) << 4))
    col = word[:, None] * CODES + tl.arange(0, CODES)[None, :]
    _store_values(byte.to(tl.uint8), out, row, col, rows, cols, row_stride, col_stride, "fp8")
