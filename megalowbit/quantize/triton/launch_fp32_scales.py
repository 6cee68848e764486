"""The fast path of GPUs for INT8, INT4 and small floats under fp32 scales: launches `kernels_triton_8bit`.

It covers one scale for the tensor, blocks of 16 to 128 elements of a row, tiles, and blocks that are INT8 or
E5M2, from fp32, bf16 and fp16 of any strides, bit for bit as `reference`. Codes of six bits and scales from
the mean magnitude stay with plain torch. Triton is imported when something is launched; nothing waits for the
device, so a tensor whose maximum is given costs a second launch, which finds nothing to do unless the tensor
holds an infinity or a NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalowbit.formats.block_format import GROUP, SCALE_DTYPES, BlockFormat
from megalowbit.formats.element import E2M1, E4M3, E5M2, INT4, INT8, INT8_E5M2, ElementFormat
from megalowbit.quantize.counts import COUNT_NAMES
from megalowbit.quantize.encoding import Encoded, Encoding
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

MANTISSA_BITS: dict[ElementFormat, int] = {INT8: 0, INT4: 0, INT8_E5M2: 0, E2M1: 1, E5M2: 2, E4M3: 3}
LARGEST_BLOCK = 128  # elements of a row
TALL_ELEMENTS = 4096  # of a program where neighbours in memory are neighbours in a column; one block wide
WORD_TILE = (16, 64)  # rows and words of codes
TALL_WORD_TILE = (64, 16)


def is_for(format: BlockFormat) -> bool:
    """Whether a format is one of these, rather than one of `launch_triton`."""
    return format.scale in ("fp32", "signed_fp32")


def supports(dtype: torch.dtype, encoding: Encoding, operand_dtype: torch.dtype | None = None) -> bool:
    """Whether `encode` takes this; what it does not take, `reference` does."""
    is_covered = dtype in DTYPES and encoding.scale_from == "amax"
    return is_covered and supports_decoding(encoding.format, operand_dtype or torch.bfloat16)


def supports_decoding(format: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `decode` takes this."""
    rows, cols = format.block or (1, GROUP)
    fits = rows in (1, 16) and cols in (16, 32, 64, LARGEST_BLOCK)
    return is_for(format) and format.element in MANTISSA_BITS and fits and dtype in DTYPES


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
    from megalowbit.quantize.triton.fp4 import amax_kernel
    from megalowbit.quantize.triton.fp32_scales import encode_kernel

    format, device = encoding.format, x.device
    x = x.resolve_neg()
    rows, cols = x.shape
    codes = torch.empty(format.codes_shape(rows, cols), dtype=torch.uint8, device=device)
    scales = torch.empty(format.scales_shape(rows, cols), dtype=SCALE_DTYPES[format.scale], device=device)
    operand = None if operand_dtype is None else torch.empty(rows, cols, dtype=operand_dtype, device=device)
    source, programs = reading(x, format, signs, TALL_ELEMENTS // (format.block or (1, GROUP))[1])
    source |= {"q_scalar": encoding.q_scalar}
    tensor_scale = largest = None
    if format.block is None:
        tensor_scale = torch.empty((), dtype=torch.float32, device=device)
        largest = torch.zeros((), dtype=torch.int32, device=device)
        if tensor_amax is None:
            launch(amax_kernel, programs, device, amax=largest, ONE_SCALE=True, **source)
    counts, errors = partial_counts(programs, device) if with_counts else (None, None)
    for maximum, amax in _maxima(largest, tensor_amax).items():
        launch(
            encode_kernel,
            programs,
            device,
            **source,
            **random_words(random_key),
            **_element(format),
            amax=amax,
            largest=largest if maximum == "given" else None,
            codes=codes.view(torch.int32),
            scales=scales if tensor_scale is None else tensor_scale,
            operand=None if operand is None else as_stored(operand),
            counts=counts,
            errors=errors,
            LARGEST=format.element.max,
            MAXIMUM=maximum,
            IS_STOCHASTIC=encoding.is_stochastic,
            IS_UNBIASED=encoding.is_unbiased,
            OPERAND="none" if operand_dtype is None else DTYPES[operand_dtype],
            HAS_COUNTS=with_counts,
        )
    total, error = total_counts(counts, errors, rows * cols, max(scales.numel(), 1))
    if total is not None and tensor_scale is not None:
        total[COUNT_NAMES.index("zero_blocks")] = tensor_scale == 0
    return Encoded(codes, scales, tensor_scale, operand, total, error)


def _maxima(largest: Tensor | None, tensor_amax: Tensor | None) -> dict[str, Tensor | None]:
    """Where each launch of `encode_kernel` takes the tensor's maximum from; `largest` is what was found."""
    if largest is None:  # of no use under block scales
        return {"found": None}
    found = largest.view(torch.float32)
    if tensor_amax is None:
        return {"found": found}
    return {"given": tensor_amax.to(largest.device, torch.float32).resolve_neg(), "spoiled": found}


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
    from megalowbit.quantize.triton.fp32_scales import decode_kernel

    out = torch.empty((cols, rows) if transpose else (rows, cols), dtype=dtype, device=codes.device)
    words = as_words(codes)
    tile_rows, tile_words = TALL_WORD_TILE if transpose else WORD_TILE
    block_rows, block_cols = format.block or (1, GROUP)
    launch(
        decode_kernel,
        programs_of(words.shape[1], rows, tile_words, tile_rows),
        codes.device,
        **writing(out, transpose),
        **_element(format),
        codes=words,
        scales=scales.contiguous() if format.block else None,
        rows=rows,
        cols=cols,
        words=words.shape[1],
        DTYPE=DTYPES[dtype],
        BLOCK_ROWS=block_rows,
        BLOCK_COLS=block_cols,
        TILE_ROWS=tile_rows,
        TOP=len(format.element.grid) - 1,
        TILE_WORDS=tile_words,
    )
    return out


def _element(format: BlockFormat) -> dict[str, Any]:
    """What the kernels know of a format."""
    return {
        "BITS": format.element.bits,
        "MANTISSA": MANTISSA_BITS[format.element],
        "SCALE": format.scale if format.block else "one",
    }
