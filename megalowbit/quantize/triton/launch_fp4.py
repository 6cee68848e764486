"""Launches the FP4 kernels for GPUs, `triton.fp4`; imports Triton at the first launch.

They support NVFP4 (1 × 16 and 16 × 16) and MXFP4 with every rounding, from fp32, bf16 and fp16 with any
strides, bit-equal to `reference`. The host never waits for the device: the tensor's maximum, the exponents
and the counts stay there.

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
    SHIFT,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    new_encoded,
    no_exponents,
)
from megalowbit.quantize.triton import launch_fp8
from megalowbit.quantize.triton.launch_arguments import (
    decode_with,
    is_interpreted,
    launch,
    partial_counts,
    reading,
    rounding,
    with_counts,
)

OPERAND_DTYPES = (torch.bfloat16, torch.float32)
TALL_ROWS = 256  # rows per program for column-major matrices; one block wide
WORD_TILE = (16, 32)  # rows and words of eight codes
TALL_WORD_TILE = (64, 8)


def is_available(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device: CUDA with Triton, or any with Triton's interpreter."""
    if device.type not in ("cuda", "cpu") or not _is_installed():
        return False
    return device.type == "cuda" or (os.environ.get("TRITON_INTERPRET") == "1" and is_interpreted())


@functools.lru_cache(maxsize=1)
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def covers(format: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `encode` and `decode` take this format with operands of this dtype."""
    if dtype in SHIFT:
        return format == MXFP4
    return format in (NVFP4, NVFP4_TILED, MXFP4) and dtype in OPERAND_DTYPES


def encode(request: EncodeRequest) -> Encoded:
    """Quantise a matrix; same result as `reference.encode`; requires `covers`."""
    from megalowbit.quantize.triton import fp4 as kernels

    encoding, device, tensor_amax = request.encoding, request.x.device, request.tensor_amax
    fp8_dtype, encoded = request.fp8_dtype, new_encoded(request)
    if request.with_exponents or fp8_dtype is not None:
        encoded = encoded._replace(exponents=no_exponents(device))
    source, programs = reading(request, TALL_ROWS)
    if encoding.format.has_tensor_scale:
        if tensor_amax is None:
            tensor_amax = _maximum(source, programs, device)
        else:
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
        exponents=encoded.exponents,
        SCALE=encoding.format.scale,
        IS_UP=encoding.scale_rounding == "up",
        FOUR_OVER_SIX=encoding.four_over_six,
        IS_POWER_OF_TWO=encoding.is_power_of_two,
    )
    if fp8_dtype is not None:
        assert encoded.exponents is not None  # made above
        fp8 = launch_fp8.decode(
            encoded.codes,
            encoded.scales,
            encoded.exponents,
            *request.x.shape,
            dtype=fp8_dtype,
            transpose=False,
        )
        encoded = encoded._replace(fp8=fp8)
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
