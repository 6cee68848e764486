"""The arguments of the C kernels: the `Args` struct of codes.h, and the two calls that all formats share.

The struct holds addresses, so its tensors must outlive the call. Views with a lazy negation bit must be
resolved first, because their memory has the opposite signs. `encode_with` and `decode_with` take the C
function of a format family as their first argument.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalowbit.c_library import address
from megalowbit.formats.block_format import GROUP, NVFP4, BlockFormat
from megalowbit.formats.element import E2M1, E3M2, E4M3, E5M2, INT4, INT8, INT8_E5M2, ElementFormat
from megalowbit.quantize.encoding import (
    COUNT_NAMES,
    ERROR_NAMES,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    new_encoded,
)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ELEMENTS: dict[ElementFormat, int] = {INT4: 0, INT8: 1, INT8_E5M2: 1, E2M1: 2, E3M2: 3, E4M3: 4, E5M2: 5}
SCALE_KINDS = {"e4m3": 0, "e8m0": 1, "fp32": 3, "signed_fp32": 4}
ONE_SCALE = 2  # one scale per tensor

_FIELDS = (
    (ctypes.c_void_p, "x"),
    (ctypes.c_int64, "dtype rows cols row_stride col_stride block_rows block_cols scale_kind element is_up"),
    (ctypes.c_int64, "is_stochastic four_over_six is_power_of_two has_signs signs"),
    (ctypes.c_uint64, "key step"),
    (ctypes.c_double, "q_scalar"),
    (ctypes.c_void_p, "tensor_amax codes scales tensor_scale operand"),
    (ctypes.c_int64, "operand_dtype"),
    (ctypes.c_void_p, "counts error"),
    (ctypes.c_int64, "threads"),
)


class KernelArguments(ctypes.Structure):
    """The `Args` struct of codes.h, field by field."""

    _fields_ = [(name, kind) for kind, names in _FIELDS for name in names.split()]


def arguments_of(
    x: Tensor, out: Tensor | None, format: BlockFormat = NVFP4, **fields: Any
) -> KernelArguments:
    """Arguments of all calls: a matrix to read, a matrix to write, and the format."""
    block_rows, block_cols = format.block or (1, GROUP)
    return KernelArguments(
        x=address(x),
        dtype=DTYPES[x.dtype],
        rows=x.shape[0],
        cols=x.shape[1],
        row_stride=x.stride(0),
        col_stride=1 if x.shape[1] == 1 else x.stride(1),  # the stride of a single column is arbitrary
        operand=address(out),
        operand_dtype=0 if out is None else DTYPES[out.dtype],
        block_rows=block_rows,
        block_cols=block_cols,
        scale_kind=SCALE_KINDS[format.scale] if format.block else ONE_SCALE,
        element=ELEMENTS[format.element],
        threads=torch.get_num_threads(),
        **fields,
    )


def encode_with(function: Callable[..., int], request: EncodeRequest) -> Encoded:
    """Quantise a matrix with a C function; same result as `reference.encode`."""
    encoding, encoded = request.encoding, new_encoded(request)
    counts = error = None
    if request.with_counts:
        counts = torch.empty(len(COUNT_NAMES), dtype=torch.int64, device="cpu")
        error = torch.empty(len(ERROR_NAMES), dtype=torch.float64, device="cpu")
    x, amax = request.x.resolve_neg(), request.tensor_amax
    amax = None if amax is None else amax.to(torch.float32).resolve_neg()
    arguments = arguments_of(
        x,
        encoded.operand,
        encoding.format,
        codes=address(encoded.codes),
        scales=address(encoded.scales),
        is_up=encoding.scale_rounding == "up",
        is_stochastic=encoding.is_stochastic,
        four_over_six=encoding.four_over_six,
        is_power_of_two=encoding.is_power_of_two,
        has_signs=request.signs is not None,
        signs=request.signs or 0,
        key=request.random_key.key,  # ctypes reduces both modulo 2⁶⁴
        step=request.random_key.step,
        q_scalar=encoding.q_scalar,
        tensor_amax=address(amax),
        tensor_scale=address(encoded.tensor_scale),
        counts=address(counts),
        error=address(error),
    )
    if function(ctypes.byref(arguments)):
        raise MemoryError(f"not enough memory to count a matrix of {x.shape[0]} × {x.shape[1]}")
    return encoded if counts is None else Encoded(*encoded[:4], counts, error)


def decode_with(function: Callable[..., None], request: DecodeRequest) -> Tensor:
    """Codes × block scale with a C function; same result as `reference.decode`."""
    out = request.new_matrix()
    codes, scales = request.codes.contiguous(), request.scales.contiguous()
    arguments = arguments_of(
        out,
        out,
        request.format,
        codes=address(codes),
        scales=address(scales),
        tensor_scale=address(request.tensor_scale),
    )
    arguments.rows, arguments.cols = request.rows, request.cols
    function(ctypes.byref(arguments), ctypes.c_int64(request.transpose))
    return out
