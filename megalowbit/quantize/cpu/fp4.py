"""The fast path of CPUs: `fp4.c`, called through ctypes; `c_library` compiles it on first use.

It covers NVFP4 (1 × 16 and 16 × 16) and MXFP4 with every rounding, from fp32, bf16 and fp16 of any strides,
bit for bit as `reference`; and two passes around a GEMM. One build (about two seconds) serves all shapes.

Before use the library is checked against known bits. `why_unavailable` tells what fails, with the remedy;
the caller then uses plain torch, and says so. Threads are those of torch: both ask for the same libgomp.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megalowbit.c_library import load_checked
from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED, BlockFormat
from megalowbit.quantize.cpu.job import DTYPES, address, decode_with, encode_with, job_of
from megalowbit.quantize.cpu.known_bits import KNOWN_BITS, answers
from megalowbit.quantize.encoding import Encoded, Encoding

SOURCE = Path(__file__).with_suffix(".c")
HEADERS = ("tasks.h", "codes.h", "lanes.h")  # beside it
SUM_ROWS = 256  # rows that `column_sums` adds one after the other


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


def encode(x: Tensor, encoding: Encoding, *, library: ctypes.CDLL | None = None, **options: Any) -> Encoded:
    """Quantise a matrix that `supports` agrees to; arguments as of `reference.encode`."""
    return encode_with((library or _library()).megalowbit_encode, x, encoding, **options)


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
    function = (library or _library()).megalowbit_decode
    return decode_with(function, codes, scales, format, rows, cols, dtype, transpose=transpose)


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
    arguments = ctypes.c_float(scale), ctypes.c_void_p(address(bias)), ctypes.c_int64(out.stride(0))
    (library or _library()).megalowbit_scale_and_bias(ctypes.byref(job_of(product, out)), *arguments)
    return out


def column_sums(matrix: Tensor, *, library: ctypes.CDLL | None = None) -> Tensor:
    """Sums over the rows of an fp32, bf16 or fp16 matrix (m, n): fp32 (n,), in an order set by m alone."""
    matrix = matrix.resolve_neg() if matrix.stride(1) == 1 else matrix.contiguous().resolve_neg()
    rows, cols = matrix.shape
    out = torch.empty(cols, dtype=torch.float32, device="cpu")
    partial = torch.empty(-(-rows // SUM_ROWS), cols, dtype=torch.float32, device="cpu")
    arguments = ctypes.c_int64(SUM_ROWS), ctypes.c_void_p(address(partial))
    (library or _library()).megalowbit_column_sums(ctypes.byref(job_of(matrix, out)), *arguments)
    return out


def _library() -> ctypes.CDLL:
    library, reason = _loaded()
    assert library is not None, reason
    return library


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or `None` and the reason, of which `backends` warns."""
    return load_checked(SOURCE, HEADERS, _answers, KNOWN_BITS)


@_disable_current_modes()
def _answers(library: ctypes.CDLL) -> dict[str, int]:
    use = functools.partial
    return answers(
        use(encode, library=library),
        use(decode, library=library),
        use(scale_and_bias, library=library),
        use(column_sums, library=library),
    )
