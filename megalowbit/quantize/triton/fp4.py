"""Triton kernels that quantise to FP4; launched by `launch_fp4`, which imports this file on first use.

A program processes a tile of (rows, groups, 16). For NVFP4, a first kernel computes the tensor's largest
block maximum, and a second one reads x once and writes everything else; MXFP4 needs only the second.
Arithmetic is on bit patterns wherever a conversion instruction might round, flush or not exist (bf16 and E4M3
in the interpreter, E2M1 before Blackwell). Every device and the interpreter therefore give the bits of
`reference`. Powers of two come from shifts, divisions are exact IEEE divisions, and kernels are launched
without contraction to fused multiply-add.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megalowbit.quantize.triton.numbers import (
    E8M0_NAN,
    ELEMENT_MAX,
    INFINITY,
    SLACK,
    _bits,
    _constant,
    _divide,
    _element,
    _encode_scale,
    _float,
    _nearest,
    _power_of_two,
    _two_level,
)

GROUP = tl.constexpr(16)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
FP32_MAX = tl.constexpr((2 - 2.0**-23) * 2.0**127)
NO_EXPONENT = tl.constexpr(-256)  # as in `encoding`


@triton.jit
def _tile(cols, BLOCK_COLS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_GROUPS: tl.constexpr):
    """This program's row numbers, 16-group numbers, and the number of groups in a padded row."""
    groups = tl.cdiv(cols, BLOCK_COLS) * (BLOCK_COLS // GROUP)
    tiles = tl.cdiv(groups, TILE_GROUPS)
    program = tl.program_id(0)
    # With contiguous columns, a thread would load 16 bytes of one column, and groups would be split over
    # threads. With a hint of pairs only, a thread loads two rows of whole groups, and a warp still reads 128
    # bytes.
    row = tl.max_contiguous((program // tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS), 2)
    group = (program % tiles) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    return row, group, groups


@triton.jit
def _tile_of_blocks(
    cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """The same as `_tile` for scales: block row numbers and block column numbers."""
    width: tl.constexpr = TILE_GROUPS // (BLOCK_COLS // GROUP)
    tiles = tl.cdiv(tl.cdiv(cols, BLOCK_COLS), width)
    program = tl.program_id(0)
    block_row = (program // tiles) * (TILE_ROWS // BLOCK_ROWS) + tl.arange(0, TILE_ROWS // BLOCK_ROWS)
    return block_row, (program % tiles) * width + tl.arange(0, width)


@triton.jit
def _load_piece(
    x, row, group, rows, cols, row_stride, col_stride, PIECE: tl.constexpr, WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """fp32 (rows, groups, `WIDTH`): one piece of each group; zero beyond the matrix."""
    col = group[None, :, None] * GROUP + PIECE * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    is_inside = (row[:, None, None] < rows) & (col < cols)
    offset = row[:, None, None].to(tl.int64) * row_stride + col.to(tl.int64) * col_stride
    loaded = tl.load(x + offset, mask=is_inside, other=0)
    # bf16 is passed as int16, because shifting its bits is exact everywhere
    return _float(loaded.to(tl.int32) << 16) if DTYPE == "bf16" else loaded.to(tl.float32)


@triton.jit
def _concatenate(low, high):
    """Along the last of three axes."""
    R: tl.constexpr = low.shape[0]
    G: tl.constexpr = low.shape[1]
    return tl.join(low, high).permute(0, 1, 3, 2).reshape(R, G, 2 * low.shape[2])


@triton.jit
def _load(
    x, row, group, rows, cols, row_stride, col_stride, signs, DTYPE: tl.constexpr, HAS_SIGNS: tl.constexpr
):
    """fp32 (rows, groups, 16) of a tile, Hadamard-transformed if requested; zero outside of the matrix.

    It is loaded in pieces of 16 bytes, which a thread loads at once. A group is then in one thread, so
    maxima, transforms and packing need no exchange between threads.
    """
    if DTYPE == "fp32":
        a = _load_piece(x, row, group, rows, cols, row_stride, col_stride, 0, 4, DTYPE)
        b = _load_piece(x, row, group, rows, cols, row_stride, col_stride, 1, 4, DTYPE)
        c = _load_piece(x, row, group, rows, cols, row_stride, col_stride, 2, 4, DTYPE)
        d = _load_piece(x, row, group, rows, cols, row_stride, col_stride, 3, 4, DTYPE)
        values = _concatenate(_concatenate(a, b), _concatenate(c, d))
    else:
        low = _load_piece(x, row, group, rows, cols, row_stride, col_stride, 0, 8, DTYPE)
        high = _load_piece(x, row, group, rows, cols, row_stride, col_stride, 1, 8, DTYPE)
        values = _concatenate(low, high)
    if HAS_SIGNS:
        values = _hadamard(values, signs, group * GROUP < cols)
    return values


@triton.jit
def _butterfly(values, HALF: tl.constexpr):
    """Sums and differences of elements `HALF` apart in (rows, groups, 16)."""
    R: tl.constexpr = values.shape[0]
    G: tl.constexpr = values.shape[1]
    low, high = tl.split(values.reshape(R, G, 8 // HALF, 2, HALF).permute(0, 1, 2, 4, 3))
    return tl.join(low + high, low - high).permute(0, 1, 2, 4, 3).reshape(R, G, GROUP)


@triton.jit
def _hadamard(values, signs, is_group):
    """See `hadamard.hadamard`; groups of padding are not negated, because they would become -0."""
    flips = tl.where(is_group[:, None], (signs >> tl.arange(0, GROUP)[None, :]) << 31, 0)
    values = _float(_bits(values) ^ flips[None, :, :])
    values = _butterfly(_butterfly(_butterfly(_butterfly(values, 1), 2), 4), 8)
    return values * 0.25


@triton.jit
def _block_maxima(values, q_scalar, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """fp32 (block rows, block columns) of a tile: largest magnitude · q_scalar."""
    R: tl.constexpr = values.shape[0]
    G: tl.constexpr = values.shape[1]
    # as integers, magnitudes compare like numbers, and infinities and NaN are largest
    largest = tl.max(_bits(values) & MAGNITUDE, axis=2)
    if BLOCK_COLS > GROUP:
        largest = tl.max(largest.reshape(R, G // (BLOCK_COLS // GROUP), BLOCK_COLS // GROUP), axis=2)
    if BLOCK_ROWS > 1:
        largest = tl.max(largest.reshape(R // BLOCK_ROWS, BLOCK_ROWS, largest.shape[1]), axis=1)
    return _float(largest) * q_scalar


@triton.jit
def _expand(per_block, R: tl.constexpr, G: tl.constexpr):
    """(block rows, block columns) → (rows, groups)."""
    rows: tl.constexpr = per_block.shape[0]
    cols: tl.constexpr = per_block.shape[1]
    wide = tl.broadcast_to(per_block[:, None, :, None], (rows, R // rows, cols, G // cols))
    return wide.reshape(R, G)


@triton.jit
def _raise(pointer, maxima):
    """To the largest of `maxima`; infinities and NaN are larger than all others."""
    tl.atomic_max(pointer, tl.max(tl.max(_bits(maxima) & MAGNITUDE, axis=1), axis=0))


@triton.jit(do_not_specialize=["signs"])
def amax_kernel(
    x, amax, rows, cols, row_stride, col_stride, q_scalar, signs, DTYPE: tl.constexpr, BLOCK_ROWS:
    tl.constexpr, BLOCK_COLS: tl.constexpr, HAS_SIGNS: tl.constexpr, ONE_SCALE: tl.constexpr, TILE_ROWS:
    tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Raise `amax` (int32 bits of an fp32 number, 0 before) to the largest block maximum.

    Blocks that are not finite are ignored, unless the tensor has one scale, which they make NaN.
    """
    row, group, _ = _tile(cols, BLOCK_COLS, TILE_ROWS, TILE_GROUPS)
    values = _load(x, row, group, rows, cols, row_stride, col_stride, signs, DTYPE, HAS_SIGNS)
    maxima = _block_maxima(values, q_scalar, BLOCK_ROWS, BLOCK_COLS)
    _raise(amax, maxima if ONE_SCALE else tl.where(maxima < INFINITY, maxima, 0.0))


@triton.jit
def _drawn(key_low, key_high, step, lag):
    """Key (two words) and micro-batch of the random numbers; `step` is as in `encode_kernel`."""
    stored = tl.load(step + 1)
    low = key_low.to(tl.uint32) ^ stored.to(tl.uint32)
    high = key_high.to(tl.uint32) ^ (stored >> 32).to(tl.uint32)
    return low, high, tl.load(step) - lag


@triton.jit
def _philox(row, group, groups, key_low, key_high, step):
    """Four random words (uint32) for each 16-group, see `philox`."""
    index = row[:, None].to(tl.int64) * groups + group[None, :]
    c0, c1 = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    c2 = tl.full(c0.shape, 0, tl.uint32) + step.to(tl.uint32)
    c3 = tl.full(c0.shape, 0, tl.uint32) + (step >> 32).to(tl.uint32)
    return tl.philox_impl(c0, c1, c2, c3, key_low, key_high)


@triton.jit
def _in_turn(a, b, c, d):
    """(rows, groups, 4 · n): one number of each in turn, from (rows, groups) or (rows, groups, n)."""
    joined = tl.join(tl.join(a, c), tl.join(b, d))
    R: tl.constexpr = joined.shape[0]
    G: tl.constexpr = joined.shape[1]
    return joined.reshape(R, G, joined.numel // (R * G))


@triton.jit
def _random_fractions(row, group, groups, key_low, key_high, step):
    """24 random bits (int32) for each element of (rows, groups, 16), see `philox.random_fractions`."""
    w0, w1, w2, w3 = _philox(row, group, groups, key_low, key_high, step)
    word, before = _in_turn(w0, w1, w2, w3), _in_turn(w3, w0, w1, w2)
    first = (word << 24) | (before >> 8)  # one instruction, a funnel shift
    second = (word << 16) | (before >> 16)
    third = (word << 8) | (before >> 24)
    return (_in_turn(first, second, third, word) >> 8).to(tl.int32, bitcast=True)


@triton.jit
def _stepped(position, fraction):
    """Codes (int32) from real-valued ones times 2²⁴, see `formats.codes`."""
    return (position.to(tl.int32) + fraction) >> 24


@triton.jit
def _stochastic(scaled, fraction):
    """Codes of stochastic rounding (int32)."""
    magnitude = tl.minimum(tl.abs(scaled), ELEMENT_MAX)
    # The products are exact, so contraction rounds as an addition does.
    by_one, by_two = tl.fma(magnitude, 2.0**24, 2.0**25), tl.fma(magnitude, 2.0**23, 2.0**26)
    position = tl.minimum(tl.minimum(magnitude * 2.0**25, by_one), by_two)
    return _stepped(position, fraction) | ((_bits(scaled) >> 28) & 8)


@triton.jit
def _add_halves(values):
    R: tl.constexpr = values.shape[0]
    G: tl.constexpr = values.shape[1]
    low, high = tl.split(values.reshape(R, G, 2, values.shape[2] // 2).permute(0, 1, 3, 2))
    return low + high


@triton.jit
def _sum_of_squares(difference):
    """(rows, groups), 16 squares added half to half."""
    squares = _add_halves(_add_halves(_add_halves(difference * difference)))
    low, high = tl.split(squares)
    return low + high


@triton.jit
def _four_over_six(values, amax, encode_scale, IS_UP: tl.constexpr):
    """As `_two_level`, with the codes: maps each block's maximum to 6 or 4, whichever is more accurate."""
    six, six_decoded, six_encode, six_overflow = _two_level(amax, encode_scale, 6.0, IS_UP)
    four, four_decoded, four_encode, four_overflow = _two_level(amax, encode_scale, 4.0, IS_UP)
    six_codes = _nearest(values * six_encode[:, :, None])
    four_codes = _nearest(values * four_encode[:, :, None])
    target = values * encode_scale
    six_error = _sum_of_squares(_element(six_codes) * six_decoded[:, :, None] - target)
    four_error = _sum_of_squares(_element(four_codes) * four_decoded[:, :, None] - target)
    is_four = four_error < six_error
    return (
        tl.where(is_four, four, six),
        tl.where(is_four, four_decoded, six_decoded),
        tl.where(is_four, four_encode, six_encode),
        tl.where(is_four, four_overflow, six_overflow),
        tl.where(is_four[:, :, None], four_codes, six_codes),
    )


@triton.jit
def _store_codes(codes, is_kept, pointer, row, group, rows, groups, BITS: tl.constexpr):
    """Codes of 4 or 8 bits as words; zeros where a group (rows, groups, 1) is not kept."""
    R: tl.constexpr = codes.shape[0]
    G: tl.constexpr = codes.shape[1]
    WORDS: tl.constexpr = BITS // 2  # per group
    shifts = tl.arange(0, GROUP // WORDS) * BITS
    shifted = codes.reshape(R, G, WORDS, GROUP // WORDS) << shifts[None, None, None, :]
    words = tl.sum(shifted.to(tl.uint32, bitcast=True), axis=3).to(tl.int32, bitcast=True)
    first = (row[:, None].to(tl.int64) * groups + group[None, :]) * WORDS
    offset = first[:, :, None] + tl.arange(0, WORDS)[None, None, :]
    is_inside = (row[:, None, None] < rows) & (group[None, :, None] < groups)
    tl.store(pointer + offset, tl.where(is_kept, words, 0), mask=is_inside)


@triton.jit
def _raise_exponents(exponents, codes, scales):
    """See `Encoded.exponents`: of MXFP4 blocks, with codes (rows, groups, 16) and scales (rows, blocks)."""
    R: tl.constexpr = scales.shape[0]
    B: tl.constexpr = scales.shape[1]
    largest = tl.max(tl.max(codes & 7, axis=2).reshape(R, B, codes.shape[1] // B), axis=2)
    counts = (largest > 0) & (scales != E8M0_NAN)
    highest = tl.max(tl.where(counts, scales, NO_EXPONENT), axis=1)
    lowest = tl.max(tl.where(counts, -scales, NO_EXPONENT), axis=1)
    tl.atomic_max(exponents, tl.max(highest, axis=0))
    tl.atomic_max(exponents + 1, tl.max(lowest, axis=0))


@triton.jit
def _store_values(values, pointer, row, col, rows, cols, row_stride, col_stride, DTYPE: tl.constexpr):
    """Store (rows, x, y) where `col` (x, y) lies inside; bf16 as the upper half of fp32, which is exact."""
    offset = row[:, None, None].to(tl.int64) * row_stride + col[None, :, :].to(tl.int64) * col_stride
    is_inside = (row[:, None, None] < rows) & (col[None, :, :] < cols)
    if DTYPE == "bf16":
        tl.store(pointer + offset, (_bits(values) >> 16).to(tl.int16), mask=is_inside)
    else:
        tl.store(pointer + offset, values, mask=is_inside)


@triton.jit
def _store_two_counts(counts, first, FIRST: tl.constexpr, second, SECOND: tl.constexpr):
    """How many elements of two masks are true, from one sum: the counts are the halves of its 32 bits."""
    packed = tl.sum(first.to(tl.int32) + (second.to(tl.int32) << 16))
    tl.store(counts + FIRST, packed & 0xFFFF)
    tl.store(counts + SECOND, packed >> 16)


@triton.jit
def _store_counts(
    counts, errors, values, scaled, decoded, tensor_scale, largest, is_inside, overflows, is_zero_block,
    is_block,
):  # fmt: skip
    """This program's part of the counts in `encoding.COUNT_NAMES`."""
    tl.static_assert(values.numel < 2**15)  # for `_store_two_counts`
    counts += tl.program_id(0) * 8
    magnitude = tl.abs(scaled)
    is_nonfinite = (_bits(values) & MAGNITUDE) >= 0x7F800000
    restored = decoded * tensor_scale
    is_counted = is_inside & (restored == restored)
    is_saturated = is_inside & (magnitude > largest * SLACK)
    is_upper = is_inside & (magnitude > largest * 0.5 * SLACK)
    is_lost = is_counted & (values != 0) & (decoded == 0)
    _store_two_counts(counts, is_inside, 0, is_saturated, 1)
    _store_two_counts(counts, is_upper, 2, is_lost, 3)
    tl.store(counts + 4, tl.sum((is_inside & is_nonfinite).to(tl.int32)))
    _store_two_counts(counts, is_block, 5, is_block & overflows, 6)
    tl.store(counts + 7, tl.sum((is_block & is_zero_block).to(tl.int32)))
    x = tl.where(is_counted, values, 0.0).to(tl.float64)
    # decoded numbers may be slightly beyond the range of fp32
    restored = tl.minimum(tl.maximum(tl.where(is_counted, restored, 0.0), -FP32_MAX), FP32_MAX)
    difference = x - restored.to(tl.float64)
    tl.store(errors + tl.program_id(0) * 2, tl.sum(difference * difference))
    tl.store(errors + tl.program_id(0) * 2 + 1, tl.sum(x * x))


@triton.jit(do_not_specialize=["signs", "key_low", "key_high", "lag"])
def encode_kernel(
    x, amax, codes, scales, tensor_scale, exponents, operand, counts, errors, rows, cols, row_stride,
    col_stride, q_scalar, signs, key_low, key_high, step, lag, DTYPE: tl.constexpr, BLOCK_ROWS:
    tl.constexpr, BLOCK_COLS: tl.constexpr, SCALE: tl.constexpr, IS_UP: tl.constexpr, IS_STOCHASTIC:
    tl.constexpr, FOUR_OVER_SIX: tl.constexpr, IS_POWER_OF_TWO: tl.constexpr, HAS_SIGNS: tl.constexpr,
    OPERAND: tl.constexpr, HAS_COUNTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Everything of `reference.encode` but the tensor's maximum, from one read of x.

    The random numbers are those of the micro-batch `step[0] - lag` and of the key xor `step[1]`; `step` is
    int64 (2,), or `None` if nothing is drawn. `codes` are int32 words, `scales` bytes, `exponents` int32 or
    `None`, a bf16 `operand` is int16; `counts` (programs, 8) int32 and `errors` (programs, 2) fp64 hold one
    row a program. `OPERAND` is "none", "bf16" or "fp32".
    """
    row, group, groups = _tile(cols, BLOCK_COLS, TILE_ROWS, TILE_GROUPS)
    values = _load(x, row, group, rows, cols, row_stride, col_stride, signs, DTYPE, HAS_SIGNS)
    maxima = _block_maxima(values, q_scalar, BLOCK_ROWS, BLOCK_COLS)
    inverse = 1.0
    if SCALE == "e4m3":
        encode_scale = _encode_scale(tl.load(amax), 256.0 if FOUR_OVER_SIX else 448.0, IS_UP, IS_POWER_OF_TWO)
        inverse = _divide(_constant(1.0), encode_scale)
        if tl.program_id(0) == 0:
            tl.store(tensor_scale, inverse)
    if FOUR_OVER_SIX:
        scale, decoded, encode, overflows, code = _four_over_six(values, maxima, encode_scale, IS_UP)
    elif SCALE == "e4m3":
        scale, decoded, encode, overflows = _two_level(maxima, encode_scale, ELEMENT_MAX, IS_UP)
    else:
        scale, decoded, encode, overflows = _power_of_two(maxima, IS_UP)
    scaled = values * _expand(encode, TILE_ROWS, TILE_GROUPS)[:, :, None]
    if IS_STOCHASTIC:
        low, high, now = _drawn(key_low, key_high, step, lag)
        code = _stochastic(scaled, _random_fractions(row, group, groups, low, high, now))
    elif not FOUR_OVER_SIX:
        code = _nearest(scaled)
    factor = _expand(decoded, TILE_ROWS, TILE_GROUPS)[:, :, None]
    _store_codes(code, factor == factor, codes, row, group, rows, groups, 4)

    block_rows, block_cols = tl.cdiv(rows, BLOCK_ROWS), groups // (BLOCK_COLS // GROUP)
    block_row, block_col = _tile_of_blocks(cols, BLOCK_ROWS, BLOCK_COLS, TILE_ROWS, TILE_GROUPS)
    is_block = (block_row[:, None] < block_rows) & (block_col[None, :] < block_cols)
    offset = block_row[:, None].to(tl.int64) * block_cols + block_col[None, :]
    tl.store(scales + offset, scale.to(tl.uint8), mask=is_block)
    if exponents is not None:
        _raise_exponents(exponents, code, scale)
    if OPERAND != "none" or HAS_COUNTS:
        restored = _element(code) * factor
        col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        if OPERAND != "none":
            multiplied = restored * inverse if IS_POWER_OF_TWO else restored
            _store_values(multiplied, operand, row, col, rows, cols, cols, 1, OPERAND)
        if HAS_COUNTS:
            is_inside = (row[:, None, None] < rows) & (col[None, :, :] < cols)
            is_zero_block = (decoded == 0) if SCALE == "e4m3" else (maxima == 0)
            _store_counts(
                counts,
                errors,
                values,
                scaled,
                restored,
                inverse,
                ELEMENT_MAX,
                is_inside,
                overflows,
                is_zero_block,
                is_block,
            )
