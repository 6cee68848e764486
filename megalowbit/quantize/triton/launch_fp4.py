"""Launches the FP4 kernels for GPUs, `triton.fp4`; imports Triton at the first launch.

They support NVFP4 (1 × 16 and 16 × 16) and MXFP4 with every rounding, from fp32, bf16 and fp16 with any
strides, bit-equal to `reference`, and FP8 operands from MXFP4. The host never waits for the device: the
tensor's maximum, the counts and the number of inexact blocks stay there.

If `TRITON_INTERPRET=1` is set before Triton is imported, the kernels run in Triton's interpreter, also on CPU
tensors. That is slow and meant for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED, BlockFormat
from megalowbit.quantize.encoding import (
    BIAS,
    DEPTH,
    MANTISSA,
    SHIFT,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    check_parts,
    new_encoded,
)
from megalowbit.quantize.triton.launch_arguments import (
    decode_with,
    launch,
    partial_counts,
    reading,
    rounding,
    unpacking,
    with_counts,
    writing,
)

OPERAND_DTYPES = (torch.bfloat16, torch.float32)
TALL_ROWS = 256  # rows per program for column-major matrices; one block wide
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


def covers(format: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `encode` and `decode` take this format with operands of this dtype."""
    return format in (NVFP4, NVFP4_TILED, MXFP4) and dtype in OPERAND_DTYPES


def encode(request: EncodeRequest) -> Encoded:
    """Quantise a matrix; same result as `reference.encode`; requires `covers`."""
    from megalowbit.quantize.triton import fp4 as kernels

    encoding, device, tensor_amax = request.encoding, request.x.device, request.tensor_amax
    encoded = new_encoded(request)
    source, programs = reading(request, TALL_ROWS)
    if encoding.format.has_tensor_scale:
        if tensor_amax is None:
            tensor_amax = _maximum(source, programs, device)
        tensor_amax = tensor_amax.to(device, torch.float32).resolve_neg()
    partial = partial_counts(request, programs)
    launch(
        kernels.encode_kernel,
        programs,
        device,
        **source,
        **rounding(request, encoded, partial),
        amax=tensor_amax,
        scales=encoded.scales.view(torch.uint8),
        tensor_scale=encoded.tensor_scale,
        SCALE=encoding.format.scale,
        IS_UP=encoding.scale_rounding == "up",
        FOUR_OVER_SIX=encoding.four_over_six,
        IS_POWER_OF_TWO=encoding.is_power_of_two,
    )
    return with_counts(encoded, partial, request.x.numel())


def maximum(request: EncodeRequest) -> Tensor:
    """The maximum that `encode` computes for the tensor scale; requires `covers` and a tensor scale.

    Returns:
        Largest finite block maximum, times `q_scalar`: fp32, 0-dim.
    """
    source, programs = reading(request, TALL_ROWS)
    return _maximum(source, programs, request.x.device)


def _maximum(source: dict[str, Any], programs: int, device: torch.device) -> Tensor:
    from megalowbit.quantize.triton.fp4 import amax_kernel

    largest = torch.zeros((), dtype=torch.int32, device=device)
    launch(amax_kernel, programs, device, amax=largest, ONE_SCALE=False, **source)
    return largest.view(torch.float32)


def decode(request: DecodeRequest) -> Tensor:
    """Codes × block scale; same result as `reference.decode`; requires `covers`."""
    from megalowbit.quantize.triton.decode import decode_kernel

    scales, kind = request.scales.contiguous().view(torch.uint8), request.format.scale
    return decode_with(
        decode_kernel,
        request,
        WORD_TILE,
        TALL_WORD_TILE,
        scales=scales,
        tensor_scale=request.tensor_scale,
        SCALE=kind,
        HAS_TENSOR_SCALE=request.tensor_scale is not None,
    )


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

    The largest block exponent becomes `SHIFT`, see `quantize.encoding`. A block more than `DEPTH` below it
    does not fit exactly, and is counted.

    Returns:
        The operand in `dtype`, float8_e4m3fn or float8_e5m2, contiguous, (cols, rows) where `transpose`;
        fp32 scale, 0-dim, 1 where all blocks are zero or NaN; int32, 0-dim: how many blocks are not exact.
        Blocks of zeros fit always; elements of a NaN block are NaN.

    Raises:
        UserError: codes or scales are not those of such a matrix.
    """
    check_parts(codes, scales, MXFP4, rows, cols)
    from megalowbit.quantize.triton import decode as kernels

    device = codes.device
    out = torch.empty((cols, rows) if transpose else (rows, cols), dtype=dtype, device=device)
    out_scale = torch.empty((), dtype=torch.float32, device=device)
    inexact = torch.zeros((), dtype=torch.int32, device=device)
    packed, programs = unpacking(codes, rows, transpose, WORD_TILE, TALL_WORD_TILE)
    packed["scales"] = scales.contiguous().view(torch.uint8)
    packed["largest"] = torch.full((), -1, dtype=torch.int32, device=device)
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
