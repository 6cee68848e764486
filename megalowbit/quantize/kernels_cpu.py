"""The fast path of CPUs: `kernels_cpu.c`, called through ctypes; `c_library` compiles it on first use.

It covers NVFP4 (1 × 16 and 16 × 16) and MXFP4 with every rounding, from fp32, bf16 and fp16 of any strides,
bit for bit as `reference`; and two passes around a GEMM. One build (about two seconds) serves all shapes.

Before use the library is checked against known bits. `why_unavailable` tells what fails, with the remedy;
the caller then uses plain torch, and says so. Threads are those of torch: both ask for the same libgomp.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megalowbit.c_library import UnavailableError, find_or_build
from megalowbit.errors import UserError
from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED, SCALE_DTYPES, BlockFormat
from megalowbit.quantize.encoding import Encoded, Encoding
from megalowbit.quantize.known_bits import KNOWN_BITS, answers
from megalowbit.quantize.philox import NO_KEY, RandomKey

SOURCE = Path(__file__).with_suffix(".c")
HEADERS = ("kernels_cpu_codes.h", "kernels_cpu_lanes.h")  # beside it
SUM_ROWS = 256  # rows that `column_sums` adds one after the other
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
logger = logging.getLogger("megalowbit")


_FIELDS = (
    (ctypes.c_void_p, "x"),
    (ctypes.c_int64, "dtype rows cols row_stride col_stride block_rows block_cols scale_kind is_up"),
    (ctypes.c_int64, "is_stochastic four_over_six has_signs signs"),
    (ctypes.c_uint64, "key step"),
    (ctypes.c_double, "q_scalar"),
    (ctypes.c_void_p, "tensor_amax codes scales tensor_scale operand"),
    (ctypes.c_int64, "operand_dtype"),
    (ctypes.c_void_p, "counts error"),
    (ctypes.c_int64, "threads"),
)


class _Job(ctypes.Structure):
    """The `Job` of kernels_cpu.c, field by field."""

    _fields_ = [(name, kind) for kind, names in _FIELDS for name in names.split()]


def is_available() -> bool:
    """Whether the library works here; the first call compiles it."""
    return _loaded()[0] is not None


def why_unavailable() -> str | None:
    """Why there is no library, with the remedy; `None` if there is one."""
    return _loaded()[1]


def supports(dtype: torch.dtype, encoding: Encoding, operand_dtype: torch.dtype | None = None) -> bool:
    """Whether `encode` takes this; what it does not take, `reference` does."""
    is_covered = dtype in DTYPES and encoding.scale_from == "amax"
    return is_covered and supports_decoding(encoding.format, operand_dtype or torch.bfloat16)


def supports_decoding(format: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `decode` takes this."""
    return format in (NVFP4, NVFP4_TILED, MXFP4) and dtype in (torch.bfloat16, torch.float32)


def encode(
    x: Tensor,
    encoding: Encoding,
    *,
    random_key: RandomKey = NO_KEY,
    signs: int | None = None,
    tensor_amax: Tensor | None = None,
    operand_dtype: torch.dtype | None = None,
    with_counts: bool = False,
    library: ctypes.CDLL | None = None,
) -> Encoded:
    """Quantise a matrix that `supports` agrees to; as `reference.encode`, which explains the arguments."""
    format, (rows, cols) = encoding.format, x.shape
    new = functools.partial(torch.empty, device="cpu")
    codes = new(format.codes_shape(rows, cols), dtype=torch.uint8)
    scales = new(format.scales_shape(rows, cols), dtype=SCALE_DTYPES[format.scale])
    tensor_scale = new((), dtype=torch.float32) if format.scale == "e4m3" else None
    operand = None if operand_dtype is None else new((rows, cols), dtype=operand_dtype)
    counts = new(8, dtype=torch.int64) if with_counts else None
    error = new(2, dtype=torch.float64) if with_counts else None
    x = x.resolve_neg()
    amax = None if tensor_amax is None else tensor_amax.to(torch.float32).resolve_neg()
    job = _job(
        x,
        operand,
        format,
        codes=_address(codes),
        scales=_address(scales),
        is_up=encoding.scale_rounding == "up",
        is_stochastic=encoding.is_stochastic,
        four_over_six=encoding.four_over_six,
        has_signs=signs is not None,
        signs=signs or 0,
        key=random_key.key,  # ctypes takes both modulo 2⁶⁴
        step=random_key.step,
        q_scalar=encoding.q_scalar,
        tensor_amax=_address(amax),
        tensor_scale=_address(tensor_scale),
        counts=_address(counts),
        error=_address(error),
    )
    if (library or _library()).megalowbit_encode(ctypes.byref(job)):
        raise MemoryError(f"no memory left to count a matrix of {rows} × {cols}")
    return Encoded(codes, scales, tensor_scale, operand, counts, error)


def decode(
    codes: Tensor,
    scales: Tensor,
    format: BlockFormat,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    *,
    transpose: bool = False,
    library: ctypes.CDLL | None = None,
) -> Tensor:
    """Codes × block scale; as `reference.decode`."""
    out = torch.empty((cols, rows) if transpose else (rows, cols), dtype=dtype, device="cpu")
    codes, scales = codes.contiguous(), scales.contiguous()
    job = _job(out, out, format, codes=_address(codes), scales=_address(scales))
    job.rows, job.cols = rows, cols
    (library or _library()).megalowbit_decode(ctypes.byref(job), ctypes.c_int64(transpose))
    return out


def scale_and_bias(
    product: Tensor, scale: float, bias: Tensor | None, out: Tensor, *, library: ctypes.CDLL | None = None
) -> Tensor:
    """Write cast(product · scale + bias) to `out` and return it; each operation is rounded to fp32.

    Args:
        product: fp32, bf16 or fp16 (m, n).
        scale: rounded to fp32.
        bias: floating (n,), or `None`.
        out: fp32, bf16 or fp16 (m, n), the last stride 1; `product` itself, or memory apart from it.
        library: other than the one in use, to be checked.
    """
    assert product.shape == out.shape, (product.shape, out.shape)
    assert out.stride(1) == 1 or out.shape[1] <= 1, out.stride()
    product = product.resolve_neg() if product.stride(1) == 1 else product.contiguous().resolve_neg()
    if bias is not None:
        assert bias.shape == out.shape[1:], (bias.shape, out.shape)
        bias = bias.detach().to(torch.float32).contiguous().resolve_neg()
    arguments = ctypes.c_float(scale), ctypes.c_void_p(_address(bias)), ctypes.c_int64(out.stride(0))
    (library or _library()).megalowbit_scale_and_bias(ctypes.byref(_job(product, out)), *arguments)
    return out


def column_sums(matrix: Tensor, *, library: ctypes.CDLL | None = None) -> Tensor:
    """Sums over the rows of an fp32, bf16 or fp16 matrix (m, n): fp32 (n,), in an order set by m alone."""
    matrix = matrix.resolve_neg() if matrix.stride(1) == 1 else matrix.contiguous().resolve_neg()
    rows, cols = matrix.shape
    out = torch.empty(cols, dtype=torch.float32, device="cpu")
    partial = torch.empty(-(-rows // SUM_ROWS), cols, dtype=torch.float32, device="cpu")
    arguments = ctypes.c_int64(SUM_ROWS), ctypes.c_void_p(_address(partial))
    (library or _library()).megalowbit_column_sums(ctypes.byref(_job(matrix, out)), *arguments)
    return out


def _address(tensor: Tensor | None) -> int | None:
    """Where the numbers lie. Callers resolve views that only say they are negated, and hold the result."""
    if tensor is None:
        return None
    assert not tensor.is_neg(), "a negated view's memory holds other numbers"
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise UserError(
            f"a tensor of {tuple(tensor.shape)} has no memory: its storage was freed, gather it first"
        )
    return address


def _job(x: Tensor, out: Tensor | None, format: BlockFormat = NVFP4, **fields: Any) -> _Job:
    """What all calls have in common; the tensors must outlive the call."""
    assert format.block is not None
    return _Job(
        x=_address(x),
        dtype=DTYPES[x.dtype],
        rows=x.shape[0],
        cols=x.shape[1],
        row_stride=x.stride(0),
        col_stride=1 if x.shape[1] == 1 else x.stride(1),  # of a single column it means nothing
        operand=_address(out),
        operand_dtype=0 if out is None else DTYPES[out.dtype],
        block_rows=format.block[0],
        block_cols=format.block[1],
        scale_kind=format.scale == "e8m0",
        threads=torch.get_num_threads(),
        **fields,
    )


def _library() -> ctypes.CDLL:
    library, reason = _loaded()
    assert library is not None, reason
    return library


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or `None` and the reason."""
    try:
        library = find_or_build(SOURCE, HEADERS)
        _check_known_bits(library)
    except (UnavailableError, OSError) as error:  # OSError: there is no place for temporary files
        return None, str(error)  # `backends` warns
    if not library.megalowbit_has_threads():
        logger.warning("the CPU kernel was compiled without OpenMP and uses one thread: install libgomp")
    return library, None


@_disable_current_modes()
def _check_known_bits(library: ctypes.CDLL) -> None:
    """Refuse a library that a compiler has got wrong."""
    use = functools.partial
    found = answers(
        use(encode, library=library),
        use(decode, library=library),
        use(scale_and_bias, library=library),
        use(column_sums, library=library),
    )
    for name, got in found.items():
        if got != KNOWN_BITS[name]:
            raise UnavailableError(f"the compiled library fails its self-check ({name}): set CC")
