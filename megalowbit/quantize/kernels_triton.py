"""The quantiser as Triton kernels; `launch_triton` is the way in, and imports this file at its first use.

A program owns a tile of (rows, groups, 16): NVFP4's first kernel reduces the tensor's largest block maximum,
the second reads x once and writes everything else; MXFP4 needs the second only. Arithmetic is on bit patterns
wherever a conversion instruction might round, flush or not exist (bf16 and E4M3 in the interpreter, E2M1
before Blackwell), so every device and the interpreter give the bits of `reference`. Powers of two come from
shifts, divisions are true ones, and kernels are launched without contraction to fused multiply-add.

Nearest rounding adds 2²³: y·2 + 2²³, y + (2 + 2²³) and y/2 + (4 + 2²³), each rounded once, hold the code in
their low bits where its straight piece applies, and the least of the three is the right one.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(16)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)
NAN_BITS = tl.constexpr(0x7FC00000)
INFINITY = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(float.fromhex("0x1.fffffep127"))
FP32_MAX = tl.constexpr((2 - 2.0**-23) * 2.0**127)
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
def _encode_scale(amax, SCALE_MAX: tl.constexpr):
    """S, see `formats.block_scale`."""
    encode = tl.minimum(_divide(_constant(SCALE_MAX * ELEMENT_MAX), amax), 2.0**126)
    return tl.where(amax > 0, encode, 1.0)


@triton.jit
def _two_level(amax, encode_scale, MAX: tl.constexpr, IS_UP: tl.constexpr):
    """Stored and decoded scale, encode factor and overflow of blocks, see `formats.block_scale`."""
    unclamped = _divide(amax, _divide(_constant(MAX), encode_scale))
    clamped = tl.minimum(unclamped, E4M3_MAX)
    code = _round_to_fp8(clamped, 3, 7)
    if IS_UP:
        code += (_decode_scale(code, "e4m3") < clamped).to(tl.int32)
    is_finite = amax < INFINITY
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
def _tile(cols, BLOCK_COLS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_GROUPS: tl.constexpr):
    """This program's row numbers, 16-group numbers, and the number of groups in a padded row."""
    groups = tl.cdiv(cols, BLOCK_COLS) * (BLOCK_COLS // GROUP)
    tiles = tl.cdiv(groups, TILE_GROUPS)
    program = tl.program_id(0)
    row = (program // tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    group = (program % tiles) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    return row, group, groups


@triton.jit
def _tile_of_blocks(
    cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """As `_tile`, for scales: block row numbers and block column numbers."""
    width: tl.constexpr = TILE_GROUPS // (BLOCK_COLS // GROUP)
    tiles = tl.cdiv(tl.cdiv(cols, BLOCK_COLS), width)
    program = tl.program_id(0)
    block_row = (program // tiles) * (TILE_ROWS // BLOCK_ROWS) + tl.arange(0, TILE_ROWS // BLOCK_ROWS)
    return block_row, (program % tiles) * width + tl.arange(0, width)


@triton.jit
def _load(
    x, row, group, rows, cols, row_stride, col_stride, signs, DTYPE: tl.constexpr, HAS_SIGNS: tl.constexpr
):
    """fp32 (rows, groups, 16) of a tile, transformed if so; zero beyond the matrix."""
    col = group[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    is_inside = (row[:, None, None] < rows) & (col < cols)
    offset = row[:, None, None].to(tl.int64) * row_stride + col.to(tl.int64) * col_stride
    loaded = tl.load(x + offset, mask=is_inside, other=0)
    # bf16 comes as int16: shifting its bits is exact everywhere.
    values = _float(loaded.to(tl.int32) << 16) if DTYPE == "bf16" else loaded.to(tl.float32)
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
    """As `hadamard.hadamard`; groups of padding keep their signs, or they would become negative zeros."""
    flips = tl.where(is_group[:, None], (signs >> tl.arange(0, GROUP)[None, :]) << 31, 0)
    values = _float(_bits(values) ^ flips[None, :, :])
    values = _butterfly(_butterfly(_butterfly(_butterfly(values, 1), 2), 4), 8)
    return values * 0.25


@triton.jit
def _block_maxima(values, q_scalar, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """fp32 (block rows, block columns) of a tile: largest magnitude · q_scalar, not finite where spoiled."""
    R: tl.constexpr = values.shape[0]
    G: tl.constexpr = values.shape[1]
    # As integers, magnitudes compare like numbers, and infinities and NaN lie above all others.
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


@triton.jit(do_not_specialize=["signs"])
def amax_kernel(
    x, amax, rows, cols, row_stride, col_stride, q_scalar, signs, DTYPE: tl.constexpr, BLOCK_ROWS:
    tl.constexpr, BLOCK_COLS: tl.constexpr, HAS_SIGNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_GROUPS:
    tl.constexpr,
):  # fmt: skip
    """Raise `amax` (int32 bits of an fp32 number, 0 before) to the largest finite block maximum."""
    row, group, _ = _tile(cols, BLOCK_COLS, TILE_ROWS, TILE_GROUPS)
    values = _load(x, row, group, rows, cols, row_stride, col_stride, signs, DTYPE, HAS_SIGNS)
    maxima = _block_maxima(values, q_scalar, BLOCK_ROWS, BLOCK_COLS)
    finite = tl.where(maxima < INFINITY, maxima, 0.0)
    tl.atomic_max(amax, tl.max(tl.max(_bits(finite), axis=1), axis=0))


@triton.jit
def _nearest(scaled):
    """Codes of nearest-even rounding (int32), see the top of this file."""
    magnitude = tl.minimum(tl.abs(scaled), ELEMENT_MAX)
    by_half = tl.fma(magnitude, 2.0, INTEGERS)
    by_one = magnitude + (INTEGERS + 2)
    by_two = tl.fma(magnitude, 0.5, INTEGERS + 4)
    code = _bits(tl.minimum(tl.minimum(by_half, by_one), by_two))
    return (code & 7) | ((_bits(scaled) >> 28) & 8)


@triton.jit
def _philox(row, group, groups, key_low, key_high, step_low, step_high):
    """Four random words (uint32) for each 16-group, see `philox`."""
    index = row[:, None].to(tl.int64) * groups + group[None, :]
    c0, c1 = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    c2 = tl.full(c0.shape, 0, tl.uint32) + step_low.to(tl.uint32)
    c3 = tl.full(c0.shape, 0, tl.uint32) + step_high.to(tl.uint32)
    return tl.philox_impl(c0, c1, c2, c3, key_low.to(tl.uint32), key_high.to(tl.uint32))


@triton.jit
def _stochastic(scaled, row, group, groups, key_low, key_high, step_low, step_high):
    """Codes of stochastic rounding (int32), see `formats.rounding`."""
    R: tl.constexpr = scaled.shape[0]
    G: tl.constexpr = scaled.shape[1]
    w0, w1, w2, w3 = _philox(row, group, groups, key_low, key_high, step_low, step_high)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(R, G, 4, 1)
    # A byte placed high in the mantissa of 1.0 is 1 + byte/256.
    shifted = (words >> (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, None, :]) & 0xFF
    noise = _float(((shifted << 15) | 0x3F800000).to(tl.int32, bitcast=True).reshape(R, G, GROUP)) - (
        1 - 1 / 512
    )
    magnitude = tl.minimum(tl.abs(scaled), ELEMENT_MAX)
    position = tl.minimum(tl.minimum(magnitude + magnitude, magnitude + 2.0), magnitude * 0.5 + 4.0)
    return (position + noise).to(tl.int32) | ((_bits(scaled) >> 28) & 8)


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
    """As `_two_level`, with the codes: each block's maximum becomes 6 or 4, whichever errs less."""
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
def _store_codes(codes, is_kept, pointer, row, group, rows, groups):
    """Eight codes a word, two words a group; zeros where a group (rows, groups, 1) is not kept."""
    R: tl.constexpr = codes.shape[0]
    G: tl.constexpr = codes.shape[1]
    shifted = codes.reshape(R, G, 2, 8) << (tl.arange(0, 8) * 4)[None, None, None, :]
    words = tl.sum(shifted.to(tl.uint32, bitcast=True), axis=3).to(tl.int32, bitcast=True)
    offset = (row[:, None].to(tl.int64) * groups + group[None, :])[:, :, None] * 2 + tl.arange(0, 2)[
        None, None, :
    ]
    is_inside = (row[:, None, None] < rows) & (group[None, :, None] < groups)
    tl.store(pointer + offset, tl.where(is_kept, words, 0), mask=is_inside)


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
def _store_counts(
    counts, errors, values, scaled, decoded, tensor_scale, is_inside, overflows, is_zero_block, is_block,
):  # fmt: skip
    """This program's share of the counts, see `counts.count_errors`; what the shape tells comes later."""
    counts += tl.program_id(0) * 8
    magnitude = tl.abs(scaled)
    is_nonfinite = (_bits(values) & MAGNITUDE) >= 0x7F800000
    restored = decoded * tensor_scale
    is_counted = is_inside & (restored == restored)
    tl.store(counts + 1, tl.sum((is_inside & (magnitude > ELEMENT_MAX * SLACK)).to(tl.int32)))
    tl.store(counts + 2, tl.sum((is_inside & (magnitude > ELEMENT_MAX / 2 * SLACK)).to(tl.int32)))
    tl.store(counts + 3, tl.sum((is_counted & (values != 0) & (decoded == 0)).to(tl.int32)))
    tl.store(counts + 4, tl.sum((is_inside & is_nonfinite).to(tl.int32)))
    tl.store(counts + 6, tl.sum((is_block & overflows).to(tl.int32)))
    tl.store(counts + 7, tl.sum((is_block & is_zero_block).to(tl.int32)))
    x = tl.where(is_counted, values, 0.0).to(tl.float64)
    # What is restored may lie a little beyond fp32.
    restored = tl.minimum(tl.maximum(tl.where(is_counted, restored, 0.0), -FP32_MAX), FP32_MAX)
    difference = x - restored.to(tl.float64)
    tl.store(errors + tl.program_id(0) * 2, tl.sum(difference * difference))
    tl.store(errors + tl.program_id(0) * 2 + 1, tl.sum(x * x))


@triton.jit(do_not_specialize=["signs", "key_low", "key_high", "step_low", "step_high"])
def encode_kernel(
    x, amax, codes, scales, tensor_scale, operand, counts, errors, rows, cols, row_stride, col_stride,
    q_scalar, signs, key_low, key_high, step_low, step_high, DTYPE: tl.constexpr, BLOCK_ROWS:
    tl.constexpr, BLOCK_COLS: tl.constexpr, SCALE: tl.constexpr, IS_UP: tl.constexpr, IS_STOCHASTIC:
    tl.constexpr, FOUR_OVER_SIX: tl.constexpr, HAS_SIGNS: tl.constexpr, OPERAND: tl.constexpr, HAS_COUNTS:
    tl.constexpr, TILE_ROWS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Everything of `reference.encode` but the tensor's maximum, from one read of x.

    `codes` are int32 words, `scales` bytes, a bf16 `operand` is int16; `counts` (programs, 8) int32 and
    `errors` (programs, 2) fp64 hold one row a program. `OPERAND` is "none", "bf16" or "fp32".
    """
    row, group, groups = _tile(cols, BLOCK_COLS, TILE_ROWS, TILE_GROUPS)
    values = _load(x, row, group, rows, cols, row_stride, col_stride, signs, DTYPE, HAS_SIGNS)
    maxima = _block_maxima(values, q_scalar, BLOCK_ROWS, BLOCK_COLS)
    inverse = 1.0
    if SCALE == "e4m3":
        encode_scale = _encode_scale(tl.load(amax), 256.0 if FOUR_OVER_SIX else 448.0)
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
        code = _stochastic(scaled, row, group, groups, key_low, key_high, step_low, step_high)
    elif not FOUR_OVER_SIX:
        code = _nearest(scaled)
    factor = _expand(decoded, TILE_ROWS, TILE_GROUPS)[:, :, None]
    _store_codes(code, factor == factor, codes, row, group, rows, groups)

    block_rows, block_cols = tl.cdiv(rows, BLOCK_ROWS), groups // (BLOCK_COLS // GROUP)
    block_row, block_col = _tile_of_blocks(cols, BLOCK_ROWS, BLOCK_COLS, TILE_ROWS, TILE_GROUPS)
    is_block = (block_row[:, None] < block_rows) & (block_col[None, :] < block_cols)
    offset = block_row[:, None].to(tl.int64) * block_cols + block_col[None, :]
    tl.store(scales + offset, scale.to(tl.uint8), mask=is_block)
    if OPERAND != "none" or HAS_COUNTS:
        restored = _element(code) * factor
        col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        if OPERAND != "none":
            _store_values(restored, operand, row, col, rows, cols, cols, 1, OPERAND)
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
                is_inside,
                overflows,
                is_zero_block,
                is_block,
            )
