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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED, BlockFormat
from megalowbit.quantize.encoding import (
    SHIFT,
    DecodeRequest,
    Encoded,
    EncodedShapes,
    EncodeRequest,
    Encoding,
    new_encoded,
    no_exponents,
)
from megalowbit.quantize.triton import launch_fp8
from megalowbit.quantize.triton.fixed_arguments import FixedArguments
from megalowbit.quantize.triton.launch_arguments import (
    DTYPES,
    NOTHING_DRAWN,
    decode_with,
    is_interpreted,
    launch_fixed,
    partial_counts,
    random_arguments,
    reading_of,
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
    if request.x.is_neg():  # its strides may be others once the signs are resolved
        request = request._replace(x=request.x.resolve_neg())
    x, device, tensor_amax = request.x, request.x.device, request.tensor_amax
    fp8_dtype, arguments = request.fp8_dtype, _arguments_of(request)
    encoded = new_encoded(request, arguments.shapes)
    if request.with_exponents or fp8_dtype is not None:
        encoded = encoded._replace(exponents=no_exponents(device))
    if request.encoding.format.has_tensor_scale:
        if tensor_amax is None:
            tensor_amax = _maximum(x, request.signs, arguments.of_amax)
        else:
            tensor_amax = tensor_amax.to(device, torch.float32).resolve_neg()
    partial = partial_counts(request, arguments.of_encode.programs)
    is_drawn = request.encoding.is_stochastic
    launch_fixed(
        _kernels().encode_kernel,
        device,
        arguments.of_encode,
        x=x,
        amax=tensor_amax,
        codes=encoded.codes,
        scales=encoded.scales,
        tensor_scale=encoded.tensor_scale,
        exponents=encoded.exponents,
        operand=encoded.operand,
        counts=partial[0],
        errors=partial[1],
        signs=request.signs or 0,
        **(random_arguments(request.random_key, device) if is_drawn else NOTHING_DRAWN),
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
    return with_counts(encoded, partial)


@functools.lru_cache(maxsize=1)
def _kernels() -> Any:
    from megalowbit.quantize.triton import fp4  # imports Triton

    return fp4


def maximum(request: EncodeRequest) -> Tensor:
    """The maximum that `encode` computes for the tensor scale; requires `covers` and a tensor scale.

    Returns:
        Largest finite block maximum, times `q_scalar`: fp32, 0-dim.
    """
    request = request._replace(x=request.x.resolve_neg())
    return _maximum(request.x, request.signs, _arguments_of(request).of_amax)


def _maximum(x: Tensor, signs: int | None, arguments: FixedArguments) -> Tensor:
    largest = torch.zeros((), dtype=torch.float32, device=x.device)  # the kernel raises the bits, as int32
    launch_fixed(_kernels().amax_kernel, x.device, arguments, x=x, amax=largest, signs=signs or 0)
    return largest


class _EncodingArguments(NamedTuple):
    """What is the same in each step of a layer: arguments by kernel, and shapes of the result."""

    of_amax: FixedArguments
    of_encode: FixedArguments
    shapes: EncodedShapes


def _arguments_of(request: EncodeRequest) -> _EncodingArguments:
    x, operand_dtype = request.x, None if request.fp8_dtype is not None else request.operand_dtype
    has_signs = request.signs is not None
    source = x.shape, x.stride(), x.dtype, request.encoding, has_signs, request.with_counts
    return _cached_arguments(*source, operand_dtype)


@functools.lru_cache(maxsize=4096)
def _cached_arguments(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    encoding: Encoding,
    has_signs: bool,
    with_counts: bool,
    operand_dtype: torch.dtype | None,
) -> _EncodingArguments:
    source, programs = reading_of(shape, strides, dtype, encoding, has_signs, with_counts, TALL_ROWS)
    choices = {
        "IS_STOCHASTIC": encoding.is_stochastic,
        "OPERAND": "none" if operand_dtype is None else DTYPES[operand_dtype],
        "HAS_COUNTS": with_counts,
        "SCALE": encoding.format.scale,
        "IS_UP": encoding.scale_rounding == "up",
        "FOUR_OVER_SIX": encoding.four_over_six,
        "IS_POWER_OF_TWO": encoding.is_power_of_two,
    }
    return _EncodingArguments(
        FixedArguments({**source, "ONE_SCALE": False}, programs, words=("amax",)),
        FixedArguments({**source, **choices}, programs, words=("codes",)),
        EncodedShapes.of(encoding.format, *shape),
    )


def decode(request: DecodeRequest) -> Tensor:
    """Codes × block scale; same result as `reference.decode`; requires `covers`."""
    from megalowbit.quantize.triton.decode import decode_kernel

    return decode_with(
        decode_kernel,
        request,
        WORD_TILE,
        TALL_WORD_TILE,
        {"scales": request.scales.contiguous(), "tensor_scale": request.tensor_scale},
        SCALE=request.format.scale,
        HAS_TENSOR_SCALE=request.tensor_scale is not None,
    )
