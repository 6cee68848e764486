"""The reference quantizer in plain torch operations, for every format and device; it defines all kernels.

Each step is one rounded fp32 operation on whole matrices, without fusion. `backends` falls back to it, with a
line in the log, if a compiler or Triton is missing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from megalowbit.formats.block_format import GROUP, MXFP4, BlockFormat
from megalowbit.formats.block_scale import (
    E4M3_MAX,
    SLACK,
    BlockScales,
    block_scales,
    decode_scales,
    tensor_encode_scale,
    two_level_scales,
)
from megalowbit.formats.codes import (
    FRACTION_BITS,
    code_values,
    nearest_codes,
    pack_codes,
    stochastic_codes,
    unpack_codes,
)
from megalowbit.formats.element import E4M3
from megalowbit.formats.mixed_blocks import largest_elements, mixed_scales_and_codes, mixed_values
from megalowbit.quantize.encoding import (
    DEPTH,
    NO_EXPONENT,
    SHIFT,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    Encoding,
    Fp8Operand,
    no_exponents,
)
from megalowbit.quantize.hadamard import hadamard
from megalowbit.quantize.philox import NO_KEY, RandomKey, random_fractions, random_words

EDEN_SCALE_MAX = 256.0  # leaves room for the correction, which is below 1.3
# If 6 is 2.92247856 root mean squares, E2M1 has the smallest squared error of a Gaussian. A scale is a/4
# rounded down (not a/6, hence 4/6), and with √2 the nearest power of two.
QUEST_MAGNITUDE = 2.92247856 * 4 / 6 * math.sqrt(2)
E8M0_NAN, E8M0_BIAS = 255, 127  # codes of NaN and of 2^0


def encode(request: EncodeRequest) -> Encoded:
    """Quantise a matrix, without waiting for the device."""
    x, encoding = request.x, request.encoding
    format = encoding.format
    rows, cols = x.shape
    padded_rows, padded_cols = format.padded(rows, cols)
    matrix = x.to(torch.float32)
    if request.signs is not None:
        matrix = hadamard(matrix, request.signs)  # before padding, whose zeros would become -0
    matrix = torch.nn.functional.pad(matrix, (0, padded_cols - cols, 0, padded_rows - rows))
    amax = _magnitudes(matrix, encoding, rows, cols)
    scales, codes = _scales_and_codes(matrix, amax, request)
    codes, matrix = codes[:rows], matrix[:rows, :cols]
    decoded = _values(codes, scales.codes, format) * _expand(scales.decoded, format, codes)
    operand = None
    if request.operand_dtype is not None:
        operand = decoded[:, :cols]
        if encoding.is_power_of_two and scales.tensor_scale is not None:
            operand = operand * scales.tensor_scale
        operand = operand.to(request.operand_dtype).contiguous()
    counts = error = None
    if request.with_counts:
        scaled = _scaled(matrix, _expand(scales.encode, format, matrix), format)
        largest = _largest(scales.codes, format, matrix)
        counts, error = _count_errors(matrix, scaled, decoded[:, :cols], scales, amax, largest)
    stored = (
        scales.codes.view(format.scales_shape(rows, cols)) if format.block else scales.codes.new_empty(0, 0)
    )
    return Encoded(
        pack_codes(codes, format.element.bits), stored, scales.tensor_scale, operand, counts, error
    )


def decode(request: DecodeRequest) -> Tensor:
    """Codes × block scale (× tensor scale), as a contiguous matrix."""
    codes, scales, format, rows, cols, dtype, transpose, tensor_scale = request
    values = _values(unpack_codes(codes, format.element.bits), scales, format)
    if format.block is not None:
        decoded = decode_scales(scales)
        decoded = decoded.abs() if format.scale == "signed_fp32" else decoded
        values = values * _expand(decoded, format, values)
    if tensor_scale is not None:
        values = values * tensor_scale
    values = values[:rows, :cols].to(dtype)
    return (values.t() if transpose else values).contiguous()


def block_exponents(codes: Tensor, scales: Tensor) -> Tensor:
    """`Encoded.exponents` of MXFP4 codes and scales."""
    if codes.numel() == 0:
        return no_exponents(codes.device)
    exponent = scales.view(torch.uint8).to(torch.int32)  # (rows, blocks)
    # codes is (rows, blocks · 16), two 4-bit codes a byte; 0x77 clears both sign bits
    largest = (codes & 0x77).unflatten(1, (exponent.shape[1], -1)).amax(2)  # (rows, blocks)
    counts = largest.ne(0) & (exponent != E8M0_NAN)
    return torch.where(counts, torch.stack([exponent, -exponent]), NO_EXPONENT).amax((1, 2))


def decode_fp8(
    codes: Tensor,
    scales: Tensor,
    exponents: Tensor,
    cols: int,
    dtype: torch.dtype,
    transpose: bool,
) -> Fp8Operand:
    """MXFP4 as an FP8 operand, by a table; exact if no block is more than `DEPTH` below the highest one."""
    depth, highest = DEPTH[dtype], exponents[0]
    # Each block selects a row of the table by how far its exponent is below the highest one.
    stored = scales.view(torch.uint8).to(torch.int32)  # (rows, blocks)
    row = (stored - (highest - depth)).clamp(0, depth).masked_fill(stored == E8M0_NAN, depth + 1)
    words = codes.unflatten(1, (row.shape[1], -1)).to(torch.int32)  # (rows, blocks, 16) bytes, two codes each
    pairs = _fp8_table(dtype, codes.device)[words + row.unsqueeze(2) * 256]  # two FP8 numbers each
    matrix = pairs.flatten(1).view(torch.uint8)[:, :cols]  # the last block may reach beyond cols
    power = torch.where(highest < 0, E8M0_BIAS, highest - SHIFT[dtype]).clamp(1, 254)  # of normal numbers
    scale = (power << 23).to(torch.int32).view(torch.float32)
    return Fp8Operand((matrix.t() if transpose else matrix).contiguous().view(dtype), scale)


def _fp8_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Lookup table (depth + 2) · 256 of int16: a byte of two E2M1 codes → two FP8 numbers.

    Row i belongs to exponents depth - i below the highest; the last row is NaN.
    """
    depth, shift = DEPTH[dtype], SHIFT[dtype]
    powers = [2.0 ** (exponent - depth + shift) for exponent in range(depth + 1)]
    rows = torch.tensor([*powers, math.nan], dtype=torch.float32, device="cpu")
    values = torch.tensor(MXFP4.element.code_values(), dtype=torch.float32, device="cpu")
    numbers = torch.outer(rows, values).to(dtype).view(torch.uint8)
    byte = torch.arange(256, device="cpu")
    pairs = torch.stack([numbers[:, byte & 15], numbers[:, byte >> 4]], dim=2)
    return pairs.flatten(1).view(torch.int16).flatten().to(device)


def _blocks(matrix: Tensor, format: BlockFormat) -> Tensor:
    """View as (block rows, rows of a block, block columns, columns of a block), of `scale_block`s."""
    rows, cols = format.scale_block or matrix.shape
    return matrix.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))


def _magnitudes(matrix: Tensor, encoding: Encoding, rows: int, cols: int) -> Tensor:
    """Largest magnitude of each block times `q_scalar`, or the one that `scale_from` asks for.

    `rows` and `cols` are those without padding. The result is fp32 (block rows, block columns), NaN for
    blocks with an infinity or a NaN.
    """
    blocks = _blocks(matrix, encoding.format).abs()
    amax = blocks.amax((1, 3))  # torch's maximum propagates NaN
    if encoding.scale_from == "mean":
        mean = blocks.sum((1, 3), dtype=torch.float64).div(rows * cols).to(torch.float32)
        amax = torch.where(amax.isfinite(), mean, amax)  # padding does not change the sum
    if encoding.scale_from == "rms":
        amax = torch.where(amax.isfinite(), _root_mean_squares(blocks, cols) * QUEST_MAGNITUDE, amax)
    amax = amax * encoding.q_scalar
    return torch.where(amax.isfinite(), amax, torch.nan)


def _root_mean_squares(blocks: Tensor, cols: int) -> Tensor:
    """Of each block (one row high) of a matrix with `cols` columns, without its padding; fp32."""
    width = blocks.shape[3]
    squares = blocks.squeeze(1).to(torch.float64).square()  # (rows, block columns, width)
    while squares.shape[2] > 1:  # a fixed order of additions, the same on every device
        low, high = squares.chunk(2, 2)
        squares = low + high
    starts = torch.arange(0, width * blocks.shape[2], width, dtype=torch.float64, device=blocks.device)
    counts = (cols - starts).clamp(1, width)  # columns of each block that are no padding
    return (squares.squeeze(2) / counts).sqrt().to(torch.float32)


def _random(matrix: Tensor, random_key: RandomKey) -> Tensor:
    """The random numbers for `stochastic_codes`, in the shape of a padded matrix."""
    return random_fractions(matrix.numel() // GROUP, random_key, matrix.device).view(matrix.shape)


def _values(codes: Tensor, stored_scales: Tensor, format: BlockFormat) -> Tensor:
    """Decode codes without their scales; `stored_scales` are needed for the format of mixed blocks."""
    if format.scale == "signed_fp32":
        return mixed_values(codes, _expand(torch.signbit(stored_scales), format, codes))
    return code_values(codes, format.element)


def _largest(stored_scales: Tensor, format: BlockFormat, like: Tensor) -> Tensor | float:
    """The largest element of the format; for mixed blocks one number for each element."""
    if format.scale == "signed_fp32":
        return _expand(largest_elements(torch.signbit(stored_scales)), format, like)
    return format.element.max


def _expand(per_block: Tensor, format: BlockFormat, like: Tensor) -> Tensor:
    """Repeat block values for each element: (block rows, block columns) → (rows, cols) of `like` at most."""
    if format.block is None:
        return per_block.expand(like.shape)
    assert format.scale_block is not None
    rows, cols = format.scale_block
    return per_block.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: like.shape[0], : like.shape[1]]


def _scaled(matrix: Tensor, encode_scale: Tensor, format: BlockFormat) -> Tensor:
    """The matrix divided by its scales, to be rounded to codes; zeros if the scale is 0."""
    if format.scale in ("fp32", "signed_fp32"):
        return torch.where(encode_scale == 0, matrix * 0, matrix / encode_scale)
    return matrix * encode_scale


def _scales_and_codes(matrix: Tensor, amax: Tensor, request: EncodeRequest) -> tuple[BlockScales, Tensor]:
    encoding = request.encoding
    if encoding.format.scale == "signed_fp32":
        random = _random(matrix, request.random_key) if encoding.is_stochastic else None
        return mixed_scales_and_codes(matrix, amax, request.x.shape[1], random)
    if encoding.four_over_six:
        return _four_over_six(matrix, amax, request)
    if encoding.is_eden:
        return _eden(matrix, amax, request)
    scales = block_scales(
        amax,
        encoding.format,
        encoding.scale_rounding,
        request.tensor_amax,
        is_power_of_two=encoding.is_power_of_two,
    )
    return scales, _codes(matrix, scales, encoding, request.random_key)


def _codes(matrix: Tensor, scales: BlockScales, encoding: Encoding, random_key: RandomKey) -> Tensor:
    """uint8 codes of a padded matrix; 0 in blocks with an infinity or a NaN."""
    format = encoding.format
    scaled = _scaled(matrix, _expand(scales.encode, format, matrix), format)
    if encoding.is_stochastic:
        codes = stochastic_codes(scaled, _random(matrix, random_key), format.element)
    else:
        codes = nearest_codes(scaled, format.element)
    is_spoiled = _expand(scales.decoded.isnan(), format, matrix)
    if format.block is None and scales.tensor_scale is not None:
        is_spoiled = scales.tensor_scale.isnan()
    return torch.where(is_spoiled, 0, codes)


def _four_over_six(matrix: Tensor, amax: Tensor, request: EncodeRequest) -> tuple[BlockScales, Tensor]:
    """For each block, map the maximum to 6 or to 4, whichever has the smaller (expected) squared error."""
    encoding = request.encoding
    format = encoding.format
    encode_scale = tensor_encode_scale(
        amax,
        format,
        request.tensor_amax,
        encoding.four_over_six_max,
        encoding.scale_rounding,
        encoding.is_power_of_two,
    )
    candidates = []
    for element_max in (6.0, 4.0):
        scales = two_level_scales(amax, encode_scale, element_max, encoding.scale_rounding)
        codes = _codes(matrix, scales, encoding, request.random_key)
        squares = _blocks(_squares(matrix, codes, scales, encode_scale, encoding), format)
        squares = squares.transpose(1, 2).flatten(2)  # (block rows, block columns, elements)
        while squares.shape[2] > 1:  # a fixed order of additions, the same on every device
            low, high = squares.chunk(2, 2)
            squares = low + high
        candidates.append((scales, codes, squares.squeeze(2)))
    (six, six_codes, six_error), (four, four_codes, four_error) = candidates
    is_four = four_error < six_error
    has_room = encoding.four_over_six_max * 6 / 4 <= E4M3_MAX  # otherwise limiting a scale is the rule
    # as bytes, because torch.where does not support float8 on every device
    scale_codes = torch.where(is_four, four.codes.view(torch.uint8), six.codes.view(torch.uint8))
    mixed = BlockScales(
        codes=scale_codes.view(six.codes.dtype),
        decoded=torch.where(is_four, four.decoded, six.decoded),
        encode=torch.where(is_four, four.encode, six.encode),
        tensor_scale=six.tensor_scale,
        overflows=torch.where(is_four & has_room, four.overflows, six.overflows),
    )
    return mixed, torch.where(_expand(is_four, format, matrix), four_codes, six_codes)


def _eden(matrix: Tensor, amax: Tensor, request: EncodeRequest) -> tuple[BlockScales, Tensor]:
    """Codes rounded to nearest; scales times Σx² / Σx·Q(x) of their block, rounded stochastically.

    With the factor, the projection of Q(x) on x is x, whatever the rotation. The group of the Hadamard
    transform is one block, so each block has its own factor.
    """
    encoding = request.encoding
    format, nearest = encoding.format, replace(encoding, is_eden=False, is_stochastic=False)
    scales = block_scales(
        amax,
        format,
        encoding.scale_rounding,
        request.tensor_amax,
        EDEN_SCALE_MAX,
        is_power_of_two=encoding.is_power_of_two,
    )
    codes = _codes(matrix, scales, nearest, NO_KEY)
    scaled = _scaled(matrix, _expand(scales.encode, format, matrix), format)
    sums = torch.stack([scaled.square(), scaled * code_values(codes, format.element)])
    sums = sums.unflatten(2, (-1, GROUP))
    for half in (8, 4, 2, 1):  # a fixed order of additions, the same on every device
        sums = sums[..., :half] + sums[..., half:]
    square, projection = sums.squeeze(-1)
    wanted = scales.decoded * torch.where(projection > 0, torch.div(square, projection), 1.0)
    words = random_words(wanted.numel(), request.random_key, wanted.device)[:, 0]  # one draw for each block
    random = (words >> (32 - FRACTION_BITS)).to(torch.int32)
    drawn = stochastic_codes(wanted, random.view(wanted.shape), E4M3)
    drawn = torch.where(scales.decoded.isnan(), scales.codes.view(torch.uint8), drawn)
    stored = drawn.view(scales.codes.dtype)
    return scales._replace(codes=stored, decoded=stored.to(torch.float32)), codes


def _squares(
    matrix: Tensor, codes: Tensor, scales: BlockScales, encode_scale: Tensor, encoding: Encoding
) -> Tensor:
    """Squared error of each element times S², or its expected value over the random numbers."""
    format, target = encoding.format, matrix * encode_scale
    decoded = _expand(scales.decoded, format, matrix)
    if not encoding.is_stochastic:
        return (code_values(codes, format.element) * decoded - target).square()
    # x is rounded to its neighbours a ≤ x ≤ b with mean x, so the expected square is (x - a)(b - x)
    scaled = _scaled(matrix, _expand(scales.encode, format, matrix), format)
    low, high = (
        code_values(
            stochastic_codes(scaled, torch.full_like(scaled, random, dtype=torch.int32), format.element),
            format.element,
        )
        for random in (0, 2**FRACTION_BITS - 1)
    )
    return (low * decoded - target).abs() * (high * decoded - target).abs()


def _count_errors(
    x: Tensor, scaled: Tensor, decoded: Tensor, scales: BlockScales, amax: Tensor, largest: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Compare a matrix with its decoded codes.

    Args:
        x: fp32 (rows, cols), without padding.
        scaled: fp32, same shape: x times its block's encode scale.
        decoded: fp32, same shape: codes × block scale; NaN in blocks with an infinity or a NaN.
        scales: the block scales.
        amax: fp32, the blocks' largest magnitudes, same shape as the decoded scales.
        largest: M, the largest element of the format; for mixed blocks (rows, cols), one for each element.

    Returns:
        int64 (8,) in the order of `COUNT_NAMES` and float64 (2,) in the order of `ERROR_NAMES`.
    """
    magnitude = scaled.abs()
    has_no_zero = isinstance(largest, Tensor) or scales.codes.dtype in (torch.float8_e8m0fnu, torch.int32)
    values = decoded if scales.tensor_scale is None else decoded * scales.tensor_scale
    if has_no_zero:
        is_zero_scale = amax.view(*scales.codes.shape, -1).amax(-1) == 0  # HiF4: 16 maxima a block
    elif scales.codes.dtype in (torch.float8_e4m3fn, torch.uint8):
        is_zero_scale = scales.decoded == 0
    else:
        is_zero_scale = scales.encode == 0  # with one scale per tensor, `decoded` is 1
    counts = torch.stack(
        [
            torch.full((), x.numel(), dtype=torch.int64, device=x.device),
            (magnitude > largest * SLACK).sum(),
            (magnitude > largest / 2 * SLACK).sum(),
            ((x != 0) & (decoded == 0) & ~values.isnan()).sum(),
            (~x.isfinite()).sum(),
            torch.full((), scales.codes.numel(), dtype=torch.int64, device=x.device),
            scales.overflows.sum(),
            is_zero_scale.sum(),
        ]
    )
    exact = torch.where(values.isnan(), 0.0, x).to(torch.float64)
    difference = exact - values.nan_to_num(nan=0.0).to(torch.float64)
    return counts, torch.stack([difference.square().sum(), exact.square().sum()])
