"""Triton kernels for factors of up to 64 directions; launched by `launch_factors`, which imports this file.

Cholesky QR takes three kernels: partial Gram matrices, one program that turns them into the triangular
transform, and the product with it. Two more order the directions by length. In plain torch the same takes a
hundred kernels of a few microseconds each. Sums have a fixed order, so results repeat bitwise. A last kernel
subtracts the product of the factors. NVFP4's tensor scales follow from maxima, which the kernels find when
they write factors and residual; the kernel of the lengths, launched before, clears the memory for them.

Matrices are bf16, passed as int16, see `launch_arguments`. Numbers are scaled by powers of two, so that
squares stay in range; that is exact. `IS_WIDE` multiplies tiles of fp32, for Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megalowbit.quantize.triton.fp8 import _rounded_to_bf16
from megalowbit.quantize.triton.numbers import INFINITY, _bits, _constant, _divide, _float

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)
BLOCK = tl.constexpr(16)  # of NVFP4
FARTHEST = tl.constexpr(126)  # exponents by which numbers are scaled
SPACING = tl.constexpr(4)  # int32 from one maximum to the next; other addresses would be compiled for again
CLEARED = tl.constexpr(16)  # int32 for the maxima of Uᵀ, Vᵀ and the residual, a power of two


@triton.jit
def _widened(bits):
    """fp32 numbers of bf16 bits."""
    return _float(bits.to(tl.int32) << 16)


@triton.jit
def _magnitude(bits):
    """fp32 bits, without the sign, of bf16 bits: as integers they compare like the numbers."""
    return _bits(_widened(bits)) & MAGNITUDE


@triton.jit
def _power(exponent):
    """2^exponent, for exponents from -126 to 127."""
    return _float((exponent + 127) << 23)


@triton.jit
def _exponent(bits):
    """That of a magnitude's bits, so that the number is below 2^exponent; at most `FARTHEST` from 0."""
    return tl.minimum(tl.maximum((bits >> 23) - 126, -FARTHEST), FARTHEST)


@triton.jit
def _load_tile(x, first, k, n, row_stride, col_stride, TILE: tl.constexpr, RANK: tl.constexpr):
    """fp32 (TILE, RANK): columns of x (k, n) from `first` on, as rows; zeros outside."""
    col, row = first + tl.arange(0, TILE), tl.arange(0, RANK)
    offset = row[None, :].to(tl.int64) * row_stride + col[:, None].to(tl.int64) * col_stride
    return _widened(tl.load(x + offset, mask=(row[None, :] < k) & (col[:, None] < n), other=0))


@triton.jit
def gram_kernel(
    x, grams, exponents, tiles, k, n, row_stride, col_stride, IS_WIDE: tl.constexpr, TILE: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """Gram matrices (programs, RANK, RANK) of parts of x (k, n) times 2^-exponent, one part a program."""
    program = tl.program_id(0)
    largest = tl.full((), 0, tl.int32)
    for tile in range(0, tiles):
        values = _load_tile(x, (program * tiles + tile) * TILE, k, n, row_stride, col_stride, TILE, RANK)
        magnitude = _bits(values) & MAGNITUDE
        finite = tl.where(magnitude < INFINITY_BITS, magnitude, 0)
        largest = tl.maximum(largest, tl.max(tl.max(finite, axis=1), axis=0))
    exponent = _exponent(largest)
    total = tl.zeros((RANK, RANK), tl.float32)
    for tile in range(0, tiles):
        values = _load_tile(x, (program * tiles + tile) * TILE, k, n, row_stride, col_stride, TILE, RANK)
        values *= _power(-exponent)
        if not IS_WIDE:  # exact
            values = values.to(tl.bfloat16)
        total = tl.dot(tl.trans(values), values, total, input_precision="ieee")
    i = tl.arange(0, RANK)
    tl.store(grams + program * RANK * RANK + i[:, None] * RANK + i[None, :], total)
    tl.store(exponents + program, exponent)


@triton.jit
def _inverse_factor(matrix, k, RANK: tl.constexpr):
    """Inverse of a Gram matrix's Cholesky factor by elimination, and whether a pivot was not positive.

    The one program's time is that of its instructions, so one matrix holds all. After step j, columns up to
    j hold the inverse of the factor with a unit diagonal, below the pivots; further ones what is left of the
    Gram matrix, of which only the part above the diagonal is read.
    """
    i = tl.arange(0, RANK)
    is_diagonal = i[:, None] == i[None, :]
    failed = tl.full((), 0, tl.int32)
    for j in range(0, k):
        row = tl.sum(tl.where(i[:, None] == j, matrix, 0.0), axis=0)
        pivot = tl.sum(tl.where(i == j, row, 0.0), axis=0)
        failed = tl.where(pivot > 0, failed, 1)
        factor = tl.where(i > j, row * _divide(_constant(1.0), pivot), 0.0)
        matrix = tl.where((i[None, :] == j) & (i[:, None] > j), 0.0, matrix)
        matrix -= factor[:, None] * tl.where(i == j, 1.0, row)[None, :]
    pivots = tl.sum(tl.where(is_diagonal, matrix, 0.0), axis=1)
    inverse = tl.where(i[:, None] > i[None, :], matrix, tl.where(is_diagonal, 1.0, 0.0))
    return inverse * _divide(_constant(1.0), tl.sqrt_rn(pivots))[:, None], failed


@triton.jit
def _with_diagonal(gram, diagonal, RANK: tl.constexpr):
    i = tl.arange(0, RANK)
    return tl.where(i[:, None] == i[None, :], diagonal, gram)


@triton.jit
def transform_kernel(
    grams, exponents, transform, exponent, independent, fallbacks, parts, k, least, SHIFT: tl.constexpr,
    STRONG_SHIFT: tl.constexpr, SHARE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """`orthogonal.cholesky_rows` up to its last product, from the parts' Gram matrices; one program.

    `transform` (RANK, RANK) fp32 makes orthonormal rows of those times 2^-`exponent`, `independent` (RANK,)
    uint8 says which they are, and `fallbacks` int64 whether the factorisation failed.
    """
    i = tl.arange(0, RANK)
    highest = tl.full((), -FARTHEST, tl.int32)
    for part in range(0, parts):
        highest = tl.maximum(highest, tl.load(exponents + part))
    gram = tl.zeros((RANK, RANK), tl.float32)
    for part in range(0, parts):
        loaded = tl.load(grams + part * RANK * RANK + i[:, None] * RANK + i[None, :])
        gram += loaded * _power(tl.maximum(2 * (tl.load(exponents + part) - highest), -FARTHEST))
    squares = tl.sum(tl.where(i[:, None] == i[None, :], gram, 0.0), axis=1)
    squares = tl.where(squares < INFINITY, squares, 0.0)  # those of rows that are not finite too
    is_used = squares > least * least * tl.max(squares, axis=0)
    scale = tl.where(is_used, _divide(_constant(1.0), tl.sqrt_rn(squares)), 0.0)
    both = is_used[:, None] & is_used[None, :]
    gram = tl.where(both, gram * scale[:, None] * scale[None, :], 0.0)
    inverse, failed = _inverse_factor(_with_diagonal(gram, 1.0 + SHIFT, RANK), k, RANK)
    added = tl.full((), SHIFT, tl.float32)
    if failed != 0:
        inverse, _ = _inverse_factor(_with_diagonal(gram, 1.0 + STRONG_SHIFT, RANK), k, RANK)
        added = tl.full((), STRONG_SHIFT, tl.float32)
    squares = 1.0 - added * tl.sum(inverse * inverse, axis=1)
    is_independent = is_used & (squares > SHARE)
    length = _divide(_constant(1.0), tl.sqrt_rn(squares))
    used = tl.where(is_independent[:, None], inverse * length[:, None] * scale[None, :], 0.0)
    tl.store(transform + i[:, None] * RANK + i[None, :], used)
    tl.store(independent + i, is_independent.to(tl.uint8))
    tl.store(exponent, highest)
    tl.store(fallbacks, failed.to(tl.int64))


@triton.jit
def _product(a, b, IS_WIDE: tl.constexpr):
    """fp32 a times the numbers of bf16 in b: three numbers of bf16 hold one of fp32."""
    if IS_WIDE:
        return tl.dot(a, b, input_precision="ieee")
    b = b.to(tl.bfloat16)
    high = a.to(tl.bfloat16)
    rest = a - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b)))


@triton.jit
def rows_kernel(
    x, transform, exponent, out, k, n, row_stride, col_stride, IS_WIDE: tl.constexpr, TILE: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """Out (k, n) = transform · x · 2^-exponent."""
    first = tl.program_id(0) * TILE
    values = _load_tile(x, first, k, n, row_stride, col_stride, TILE, RANK)
    values = tl.where((_bits(values) & MAGNITUDE) < INFINITY_BITS, values, 0.0)  # of rows that are not used
    values *= _power(-tl.load(exponent))
    i = tl.arange(0, RANK)
    used = tl.load(transform + i[:, None] * RANK + i[None, :])
    made = _product(used, tl.trans(values), IS_WIDE)
    col = first + tl.arange(0, TILE)
    offset = i[:, None].to(tl.int64) * n + col[None, :]
    tl.store(out + offset, _rounded_to_bf16(made), mask=(i[:, None] < k) & (col[None, :] < n))


@triton.jit
def norms_kernel(x, norms, maxima, n, TILE: tl.constexpr):
    """Length of each row of x (programs, n), without overflow of squares; fp32. Also clears `maxima`.

    Many programs of `order_kernel` and `residual_kernel` raise those, so an earlier launch must clear them.
    """
    row = tl.program_id(0)
    if row == 0:
        i = tl.arange(0, CLEARED)
        tl.store(maxima + i, tl.zeros_like(i))
    largest = tl.full((), 0, tl.int32)
    for first in range(0, n, TILE):
        col = first + tl.arange(0, TILE)
        values = _widened(tl.load(x + row.to(tl.int64) * n + col, mask=col < n, other=0))
        largest = tl.maximum(largest, tl.max(_bits(values) & MAGNITUDE, axis=0))
    exponent = _exponent(largest)
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, n, TILE):
        col = first + tl.arange(0, TILE)
        values = _widened(tl.load(x + row.to(tl.int64) * n + col, mask=col < n, other=0))
        values *= _power(-exponent)
        total += values * values
    tl.store(norms + row, tl.sqrt_rn(tl.sum(total, axis=0)) * _power(exponent))


@triton.jit
def order_kernel(
    norms, left, product, directions, values, ordered_left, right, next_directions, maxima, rows, cols, k,
    least, TILE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """`low_rank._from_left` from the lengths of UᵀM's rows; each program moves a piece of one direction.

    The first programs of a direction move Uᵀ (k, rows), the others UᵀM and the directions (k, cols). They
    raise `maxima` to the largest magnitudes of Uᵀ and Vᵀ. All are finite: a live row has a finite length.
    """
    tiles_left = tl.cdiv(rows, TILE)
    tiles = tiles_left + tl.cdiv(cols, TILE)
    program = tl.program_id(0)
    source, piece = program // tiles, program % tiles
    i = tl.arange(0, RANK)
    norm = tl.load(norms + i, mask=i < k, other=0.0)
    largest = tl.max(tl.where(norm == norm, norm, INFINITY), axis=0)
    value = tl.where((norm < INFINITY) & (norm > least * largest), norm, 0.0)
    own = tl.sum(tl.where(i == source, value, 0.0), axis=0)
    is_before = (value > own) | ((value == own) & (i < source))
    place = tl.sum(tl.where(is_before, 1, 0), axis=0)
    if piece == 0:
        tl.store(values + place, own)
    if piece < tiles_left:
        col = piece * TILE + tl.arange(0, TILE)
        moved = tl.load(left + source.to(tl.int64) * rows + col, mask=col < rows, other=0)
        moved = tl.where(_magnitude(moved) < INFINITY_BITS, moved, tl.zeros_like(moved))
        tl.store(ordered_left + place.to(tl.int64) * rows + col, moved, mask=col < rows)
        tl.atomic_max(maxima, tl.max(_magnitude(moved), axis=0))
    else:
        col = (piece - tiles_left) * TILE + tl.arange(0, TILE)
        start, end = source.to(tl.int64) * cols, place.to(tl.int64) * cols
        strong = tl.load(product + start + col, mask=col < cols, other=0)
        found = _rounded_to_bf16(_divide(_widened(strong), own))
        old = tl.load(directions + start + col, mask=col < cols, other=0)
        is_live = own > 0
        kept = tl.where(is_live, found, tl.zeros_like(found))
        tl.store(right + end + col, kept, mask=col < cols)
        tl.atomic_max(maxima + SPACING, tl.max(tl.where(col < cols, _magnitude(kept), 0), axis=0))
        tl.store(next_directions + end + col, tl.where(is_live, found, old), mask=col < cols)


@triton.jit
def residual_kernel(
    x, tall, flat, out, amax, rows, cols, k, row_stride, col_stride, IS_WIDE: tl.constexpr, TILE_ROWS:
    tl.constexpr, TILE_COLS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Out = x - tall · flat, of (rows, cols), (rows, k) and (k, cols); all but x row-major.

    `amax` (int32 bits of an fp32 number, 0 before) is raised to the largest maximum of a finite block of 16.
    """
    tiles = tl.cdiv(cols, TILE_COLS)
    row = (tl.program_id(0) // tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    col = (tl.program_id(0) % tiles) * TILE_COLS + tl.arange(0, TILE_COLS)
    i = tl.arange(0, RANK)
    is_row, is_col, is_used = row[:, None] < rows, col[None, :] < cols, i < k
    left = tl.load(tall + row[:, None].to(tl.int64) * k + i[None, :], mask=is_row & is_used[None, :], other=0)
    right = tl.load(
        flat + i[:, None].to(tl.int64) * cols + col[None, :], mask=is_used[:, None] & is_col, other=0
    )
    left, right = _widened(left), _widened(right)
    if IS_WIDE:
        product = tl.dot(left, right, input_precision="ieee")
    else:  # exact
        product = tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16))
    offset = row[:, None].to(tl.int64) * row_stride + col[None, :].to(tl.int64) * col_stride
    rest = _rounded_to_bf16(_widened(tl.load(x + offset, mask=is_row & is_col, other=0)) - product)
    tl.store(out + row[:, None].to(tl.int64) * cols + col[None, :], rest, mask=is_row & is_col)
    magnitude = tl.where(is_row & is_col, (rest.to(tl.int32) << 16) & MAGNITUDE, 0)
    largest = tl.max(magnitude.reshape(TILE_ROWS, TILE_COLS // BLOCK, BLOCK), axis=2)
    largest = tl.where(largest < INFINITY_BITS, largest, 0)
    tl.atomic_max(amax, tl.max(tl.max(largest, axis=1), axis=0))
