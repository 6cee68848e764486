"""The Triton kernel that decodes FP4 codes to bf16 or fp32; launched by `launch_fp4`.

A program decodes a tile of (rows, words), a word being eight codes, and writes the numbers with any strides,
so the transposed matrix needs no second pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megalowbit.quantize.triton.fp4 import _store_values
from megalowbit.quantize.triton.numbers import _decode_scale, _element

CODES = tl.constexpr(8)  # codes per word


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
def _load_scales(
    scales, row, word, rows, words, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, SCALE: tl.constexpr
):
    """fp32 (rows, words) scale of each word's block."""
    block_row, block_col = row // BLOCK_ROWS, word // (BLOCK_COLS // CODES)
    offset = block_row[:, None].to(tl.int64) * (words // (BLOCK_COLS // CODES)) + block_col[None, :]
    is_inside = (row[:, None] < rows) & (word[None, :] < words)
    return _decode_scale(tl.load(scales + offset, mask=is_inside, other=0).to(tl.int32), SCALE)


@triton.jit
def decode_kernel(
    codes, scales, tensor_scale, out, rows, cols, words, row_stride, col_stride, DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, SCALE: tl.constexpr, HAS_TENSOR_SCALE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """`reference.decode`: `codes` (rows, words) int32, `scales` bytes, `out` is int16 if it is bf16."""
    row, word = _word_tile(words, TILE_ROWS, TILE_WORDS)
    loaded = _load_words(codes, row, word, rows, words)
    factor = _load_scales(scales, row, word, rows, words, BLOCK_ROWS, BLOCK_COLS, SCALE)
    if HAS_TENSOR_SCALE:
        factor *= tl.load(tensor_scale)
    values = _element(_unpack(loaded)) * factor[:, :, None]
    col = word[:, None] * CODES + tl.arange(0, CODES)[None, :]
    _store_values(values, out, row, col, rows, cols, row_stride, col_stride, DTYPE)
