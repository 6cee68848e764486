"""Launches the GPU kernels for INT8, INT4 and small floats with fp32 scales, `triton.fp32_scales`.

They support one scale per tensor, blocks of 16 to 128 elements of a row, tiles, and mixed blocks, from fp32,
bf16 and fp16 with any strides, bit-equal to `reference`. Codes of six bits and scales from the mean magnitude
use plain torch. Triton is imported at the first launch. The host never waits for the device. Therefore a
tensor whose maximum is given needs a second launch, which does nothing unless the tensor contains an infinity
or a NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalowbit.formats.block_format import GROUP, BlockFormat
from megalowbit.formats.element import E2M1, E4M3, E5M2, INT4, INT8, INT8_E5M2, ElementFormat
from megalowbit.quantize.encoding import DecodeRequest, Encoded, EncodeRequest, new_encoded
from megalowbit.quantize.triton.launch_arguments import (
    DTYPES,
    decode_with,
    launch,
    partial_counts,
    reading,
    rounding,
    with_counts,
)

MANTISSA_BITS: dict[ElementFormat, int] = {INT8: 0, INT4: 0, INT8_E5M2: 0, E2M1: 1, E5M2: 2, E4M3: 3}
LARGEST_BLOCK = 128  # elements of a row
TALL_ELEMENTS = 4096  # elements per program for column-major matrices; one block wide
WORD_TILE = (16, 64)  # rows and words of codes
TALL_WORD_TILE = (64, 16)


def is_for(format: BlockFormat) -> bool:
    """Whether a format is one of these, rather than one of `launch_fp4`."""
    return format.scale in ("fp32", "signed_fp32")


def covers(format: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `encode` and `decode` take this format with operands of this dtype."""
    rows, cols = format.block or (1, GROUP)
    fits = rows in (1, 16) and cols in (16, 32, 64, LARGEST_BLOCK)
    return is_for(format) and format.element in MANTISSA_BITS and fits and dtype in DTYPES


def encode(request: EncodeRequest) -> Encoded:
    """Quantise a matrix; same result as `reference.encode`; requires `covers`."""
    from megalowbit.quantize.triton.fp32_scales import encode_kernel

    format, device = request.encoding.format, request.x.device
    encoded = new_encoded(request)
    source, programs = _reading(request)
    largest = None
    if format.has_tensor_scale and request.tensor_amax is None:
        largest = _maximum(source, programs, device)
    elif format.has_tensor_scale:
        largest = torch.zeros((), dtype=torch.int32, device=device)
    partial = partial_counts(request, programs)
    for maximum, amax in _maxima(largest, request.tensor_amax).items():
        launch(
            encode_kernel,
            programs,
            device,
            **source,
            **rounding(request, encoded, partial),
            **_element(format),
            amax=amax,
            largest=largest if maximum == "given" else None,
            scales=encoded.scales if encoded.tensor_scale is None else encoded.tensor_scale,
            LARGEST=format.element.max,
            MAXIMUM=maximum,
        )
    return with_counts(encoded, partial)


def maximum(request: EncodeRequest) -> Tensor:
    """The maximum that `encode` computes for the tensor scale; requires `covers` and a tensor scale.

    Returns:
        Largest magnitude times `q_scalar`: fp32, 0-dim; infinite if an element is not finite.
    """
    source, programs = _reading(request)
    found = _maximum(source, programs, request.x.device).view(torch.float32)
    return torch.where(found.isfinite(), found, torch.inf)


def _reading(request: EncodeRequest) -> tuple[dict[str, Any], int]:
    return reading(request, TALL_ELEMENTS // (request.encoding.format.block or (1, GROUP))[1])


def _maximum(source: dict[str, Any], programs: int, device: torch.device) -> Tensor:
    """int32, 0-dim: the bits of the largest magnitude."""
    from megalowbit.quantize.triton.fp4 import amax_kernel

    largest = torch.zeros((), dtype=torch.int32, device=device)
    launch(amax_kernel, programs, device, amax=largest, ONE_SCALE=True, **source)
    return largest


def _maxima(largest: Tensor | None, tensor_amax: Tensor | None) -> dict[str, Tensor | None]:
    """Where each launch of `encode_kernel` takes the tensor's maximum from; `largest` is what was found."""
    if largest is None:  # not needed for block scales
        return {"found": None}
    found = largest.view(torch.float32)
    if tensor_amax is None:
        return {"found": found}
    return {"given": tensor_amax.to(largest.device, torch.float32).resolve_neg(), "spoiled": found}


def decode(request: DecodeRequest) -> Tensor:
    """Codes × block scale; same result as `reference.decode`; requires `covers`."""
    from megalowbit.quantize.triton.fp32_scales import decode_kernel

    format = request.format
    return decode_with(
        decode_kernel,
        request,
        WORD_TILE,
        TALL_WORD_TILE,
        {"scales": request.scales.contiguous() if format.block else None},
        **_element(format),
        TOP=len(format.element.grid) - 1,
    )


def _element(format: BlockFormat) -> dict[str, Any]:
    """Parameters of an element format for the kernels."""
    return {
        "BITS": format.element.bits,
        "MANTISSA": MANTISSA_BITS[format.element],
        "SCALE": format.scale if format.block else "one",
    }
