"""The fast path of GPUs: launches `kernels_triton`, and imports Triton only when something is launched.

It covers NVFP4 (1 × 16 and 16 × 16) and MXFP4 with every rounding, from fp32, bf16 and fp16 of any strides,
bit for bit as `reference`; and FP8 operands from MXFP4. Nothing waits for the device: the tensor's maximum,
the counts and the number of inexact blocks stay there.

With `TRITON_INTERPRET=1` set before Triton is imported the kernels run in Triton's interpreter, on CPU
tensors too: slow, and meant for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED, SCALE_DTYPES, BlockFormat
from megalowbit.quantize.encoding import Encoded, Encoding, check_parts
from megalowbit.quantize.fp8_operand import BIAS, DEPTH, MANTISSA, SHIFT
from megalowbit.quantize.philox import NO_KEY, RandomKey
from megalowbit.quantize.triton.launch_job import (
    DTYPES,
    as_stored,
    as_words,
    launch,
    partial_counts,
    programs_of,
    random_words,
    reading,
    total_counts,
    writing,
)

OPERAND_DTYPES = (torch.bfloat16, torch.float32)
TALL_ROWS = 256  # where neighbours in memory are neighbours in a column; one block wide
WORD_TILE = (16, 32)  # rows and words of eight codes
TALL_WORD_TILE = (64, 8)


def is_available(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device: CUDA with Triton, or any with Triton's interpreter."""
    if device.type not in ("cuda", "cpu") or not _is_installed():
        return False
    return device.type == "cuda" or (os.environ.get("TRITON_INTERPRET") == "1" and _is_interpreted())


@functools.lru_cache(maxsize=1)
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.lru_cache(maxsize=1)
def _is_interpreted() -> bool:
    """Whether Triton read the variable when the kernels were defined; a later change of it has no effect."""
    from triton.runtime.interpreter import InterpretedFunction

    from megalowbit.quantize.triton.fp4 import encode_kernel

    return isinstance(encode_kernel, InterpretedFunction)


def supports(dtype: torch.dtype, encoding: Encoding, operand_dtype: torch.dtype | None = None) -> bool:
    """Whether `encode` takes this; what it does not take, `reference` does."""
    return (
        dtype in DTYPES
        and encoding.scale_from == "amax"
        and supports_decoding(encoding.format, operand_dtype or torch.bfloat16)
    )


def supports_decoding(format: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `decode` takes this."""
    return format in (NVFP4, NVFP4_TILED, MXFP4) and dtype in OPERAND_DTYPES


def encode(
    x: Tensor,
    encoding: Encoding,
    *,
    random_key: RandomKey = NO_KEY,
    signs: int | None = None,
    tensor_amax: Tensor | None = None,
    operand_dtype: torch.dtype | None = None,
    with_counts: bool = False,
) -> Encoded:
    """Quantise a matrix that `supports` agrees to; as `reference.encode`."""
    from megalowbit.quantize.triton import fp4 as kernels

    format, device = encoding.format, x.device
    x = x.resolve_neg()
    rows, cols = x.shape
    codes = torch.empty(format.codes_shape(rows, cols), dtype=torch.uint8, device=device)
    scales = torch.empty(format.scales_shape(rows, cols), dtype=torch.uint8, device=device)
    operand = None if operand_dtype is None else torch.empty(rows, cols, dtype=operand_dtype, device=device)
    source, programs = reading(x, format, signs, TALL_ROWS)
    source |= {"q_scalar": encoding.q_scalar}
    tensor_scale = None
    if format.scale == "e4m3":
        tensor_scale = torch.empty((), dtype=torch.float32, device=device)
        if tensor_amax is None:
            largest = torch.zeros((), dtype=torch.int32, device=device)
            launch(kernels.amax_kernel, programs, device, amax=largest, ONE_SCALE=False, **source)
            tensor_amax = largest.view(torch.float32)
        tensor_amax = tensor_amax.to(device, torch.float32).resolve_neg()
    partial = partial_counts(programs, device) if with_counts else (None, None)
    launch(
        kernels.encode_kernel,
        programs,
        device,
        **source,
        **random_words(random_key),
        amax=tensor_amax,
        codes=codes.view(torch.int32),
        scales=scales,
        tensor_scale=tensor_scale,
        operand=None if operand is None else as_stored(operand),
        counts=partial[0],
        errors=partial[1],
        SCALE=format.scale,
        IS_UP=encoding.scale_rounding == "up",
        IS_STOCHASTIC=encoding.is_stochastic,
        IS_UNBIASED=encoding.is_unbiased,
        FOUR_OVER_SIX=encoding.four_over_six,
        OPERAND="none" if operand_dtype is None else DTYPES[operand_dtype],
        HAS_COUNTS=with_counts,
    )
    counts, error = total_counts(partial[0], partial[1], rows * cols, scales.numel())
    return Encoded(codes, scales.view(SCALE_DTYPES[format.scale]), tensor_scale, operand, counts, error)


def decode(
    codes: Tensor,
    scales: Tensor,
    format: BlockFormat,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    *,
    transpose: bool = False,
) -> Tensor:
    """Codes × block scale; as `reference.decode`."""
    from megalowbit.quantize.triton import decode as kernels

    assert format.block is not None
    out = torch.empty((cols, rows) if transpose else (rows, cols), dtype=dtype, device=codes.device)
    words = as_words(codes)
    tile_rows, tile_words = TALL_WORD_TILE if transpose else WORD_TILE
    launch(
        kernels.decode_kernel,
        programs_of(words.shape[1], rows, tile_words, tile_rows),
        codes.device,
        **writing(out, transpose),
        codes=words,
        scales=scales.contiguous().view(torch.uint8),
        words=words.shape[1],
        rows=rows,
        cols=cols,
        DTYPE=DTYPES[dtype],
        BLOCK_ROWS=format.block[0],
        BLOCK_COLS=format.block[1],
        SCALE=format.scale,
        TILE_ROWS=tile_rows,
        TILE_WORDS=tile_words,
    )
    return out


def decode_fp8(
    codes: Tensor,
    scales: Tensor,
    rows: int,
    cols: int,
    *,
    dtype: torch.dtype,
    transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """MXFP4 as an FP8 operand with a power of two for scale: operand · scale is the decoded matrix.

    The largest block exponent becomes `SHIFT`, see `fp8_operand`. A block more than `DEPTH` below it does not
    fit exactly, and is counted.

    Args:
        codes: uint8, of `MXFP4`.
        scales: of the same.
        rows: of the matrix.
        cols: of the matrix, padding left out.
        dtype: float8_e4m3fn or float8_e5m2.
        transpose: make the operand (cols, rows).

    Returns:
        The operand, contiguous; fp32 scale, 0-dim, 1 where all blocks are zero or NaN; int32,
        0-dim: how many blocks are not exact. Blocks of zeros fit always; elements of a NaN block are NaN.

    Raises:
        UserError: codes or scales are not those of such a matrix.
    """
    check_parts(codes, scales, MXFP4, rows, cols)
    from megalowbit.quantize.triton import decode as kernels

    device = codes.device
    out = torch.empty((cols, rows) if transpose else (rows, cols), dtype=dtype, device=device)
    out_scale = torch.empty((), dtype=torch.float32, device=device)
    largest = torch.full((), -1, dtype=torch.int32, device=device)
    inexact = torch.zeros((), dtype=torch.int32, device=device)
    words = as_words(codes)
    tile_rows, tile_words = TALL_WORD_TILE if transpose else WORD_TILE
    programs = programs_of(words.shape[1], rows, tile_words, tile_rows)
    packed = {"codes": words, "scales": scales.contiguous().view(torch.uint8), "words": words.shape[1]}
    packed |= {"rows": rows, "largest": largest, "TILE_ROWS": tile_rows, "TILE_WORDS": tile_words}
    launch(kernels.exponent_kernel, programs, device, **packed)
    launch(
        kernels.fp8_kernel,
        programs,
        device,
        **packed,
        **writing(out, transpose),
        MANTISSA=MANTISSA[dtype],
        BIAS=BIAS[dtype],
        SHIFT=SHIFT[dtype],
        REACH=DEPTH[dtype],
        cols=cols,
        out_scale=out_scale,
        inexact=inexact,
    )
    return out, out_scale, inexact
