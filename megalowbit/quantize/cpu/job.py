"""What Python hands to the C kernels: the `Job` of codes.h, and the two calls all formats share.

A job holds addresses. Its tensors must outlive the call, and views that only say they are negated must have
been resolved, because their memory holds other numbers. One function quantises, one decodes; which C function
they call is their first argument.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.formats.block_format import GROUP, NVFP4, SCALE_DTYPES, BlockFormat
from megalowbit.formats.element import E2M1, E3M2, E4M3, E5M2, INT4, INT8, INT8_E5M2, ElementFormat
from megalowbit.quantize.encoding import Encoded, Encoding
from megalowbit.quantize.philox import NO_KEY, RandomKey

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ELEMENTS: dict[ElementFormat, int] = {INT4: 0, INT8: 1, INT8_E5M2: 1, E2M1: 2, E3M2: 3, E4M3: 4, E5M2: 5}
SCALE_KINDS = {"e4m3": 0, "e8m0": 1, "fp32": 3, "signed_fp32": 4}
ONE_SCALE = 2  # of the tensor

_FIELDS = (
    (ctypes.c_void_p, "x"),
    (ctypes.c_int64, "dtype rows cols row_stride col_stride block_rows block_cols scale_kind element is_up"),
    (ctypes.c_int64, "is_stochastic is_unbiased four_over_six has_signs signs"),
    (ctypes.c_uint64, "key step"),
    (ctypes.c_double, "q_scalar"),
    (ctypes.c_void_p, "tensor_amax codes scales tensor_scale operand"),
    (ctypes.c_int64, "operand_dtype"),
    (ctypes.c_void_p, "counts error"),
    (ctypes.c_int64, "threads"),
)


class Job(ctypes.Structure):
    """The `Job` of codes.h, field by field."""

    _fields_ = [(name, kind) for kind, names in _FIELDS for name in names.split()]


def job_of(x: Tensor, out: Tensor | None, format: BlockFormat = NVFP4, **fields: Any) -> Job:
    """What all calls have in common: a matrix to read, another to write, and the format between them."""
    block_rows, block_cols = format.block or (1, GROUP)
    return Job(
        x=address(x),
        dtype=DTYPES[x.dtype],
        rows=x.shape[0],
        cols=x.shape[1],
        row_stride=x.stride(0),
        col_stride=1 if x.shape[1] == 1 else x.stride(1),  # of a single column it means nothing
        operand=address(out),
        operand_dtype=0 if out is None else DTYPES[out.dtype],
        block_rows=block_rows,
        block_cols=block_cols,
        scale_kind=SCALE_KINDS[format.scale] if format.block else ONE_SCALE,
        element=ELEMENTS[format.element],
        threads=torch.get_num_threads(),
        **fields,
    )


def address(tensor: Tensor | None) -> int | None:
    """Where the numbers lie.

    Raises:
        UserError: the tensor's storage was freed.
    """
    if tensor is None:
        return None
    assert not tensor.is_neg(), "a negated view's memory holds other numbers"
    place = tensor.data_ptr()
    if not place and tensor.numel():
        raise UserError(
            f"a tensor of {tuple(tensor.shape)} has no memory: its storage was freed, gather it first"
        )
    return place


def encode_with(
    function: Callable[..., int],
    x: Tensor,
    encoding: Encoding,
    *,
    random_key: RandomKey = NO_KEY,
    signs: int | None = None,
    tensor_amax: Tensor | None = None,
    operand_dtype: torch.dtype | None = None,
    with_counts: bool = False,
) -> Encoded:
    """Quantise a matrix by a C function; as `reference.encode`, which explains the arguments."""
    format, (rows, cols) = encoding.format, x.shape
    new = functools.partial(torch.empty, device="cpu")
    has_tensor_scale = format.scale == "e4m3" or format.block is None
    codes = new(format.codes_shape(rows, cols), dtype=torch.uint8)
    scales = new(format.scales_shape(rows, cols), dtype=SCALE_DTYPES[format.scale])
    tensor_scale = new((), dtype=torch.float32) if has_tensor_scale else None
    operand = None if operand_dtype is None else new((rows, cols), dtype=operand_dtype)
    counts = new(8, dtype=torch.int64) if with_counts else None
    error = new(2, dtype=torch.float64) if with_counts else None
    x = x.resolve_neg()
    amax = None if tensor_amax is None else tensor_amax.to(torch.float32).resolve_neg()
    job = job_of(
        x,
        operand,
        format,
        codes=address(codes),
        scales=address(scales),
        is_up=encoding.scale_rounding == "up",
        is_stochastic=encoding.is_stochastic,
        is_unbiased=encoding.is_unbiased,
        four_over_six=encoding.four_over_six,
        has_signs=signs is not None,
        signs=signs or 0,
        key=random_key.key,  # ctypes takes both modulo 2⁶⁴
        step=random_key.step,
        q_scalar=encoding.q_scalar,
        tensor_amax=address(amax),
        tensor_scale=address(tensor_scale),
        counts=address(counts),
        error=address(error),
    )
    if function(ctypes.byref(job)):
        raise MemoryError(f"no memory left to count a matrix of {rows} × {cols}")
    return Encoded(codes, scales, tensor_scale, operand, counts, error)


def decode_with(
    function: Callable[..., None],
    codes: Tensor,
    scales: Tensor,
    format: BlockFormat,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    *,
    transpose: bool = False,
) -> Tensor:
    """Codes × block scale by a C function; as `reference.decode`."""
    out = torch.empty((cols, rows) if transpose else (rows, cols), dtype=dtype, device="cpu")
    codes, scales = codes.contiguous(), scales.contiguous()
    job = job_of(out, out, format, codes=address(codes), scales=address(scales))
    job.rows, job.cols = rows, cols
    function(ctypes.byref(job), ctypes.c_int64(transpose))
    return out
