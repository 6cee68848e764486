"""The FP4 kernels for CPUs: `fp4.c`, called through ctypes; `c_library` compiles it on first use.

They support NVFP4 (1 × 16 and 16 × 16) and MXFP4 with every rounding, from fp32, bf16 and fp16 with any
strides, bit-equal to `reference`. Two more functions run after a GEMM. One build (about two seconds) is used
for all shapes.

Before use, the library is tested against known bits. If it is not available, `why_unavailable` returns the
reason and the remedy, and the caller logs it and uses plain torch. Threads are those of torch: both use the
same libgomp.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megalowbit.c_library import KernelLibrary, address
from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED, BlockFormat
from megalowbit.quantize.cpu.kernel_arguments import arguments_of, decode_with, encode_with
from megalowbit.quantize.cpu.known_bits import KNOWN_BITS, answers
from megalowbit.quantize.encoding import DecodeRequest, Encoded, EncodeRequest

SUM_ROWS = 256  # rows that `column_sums` adds sequentially


def covers(format: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `encode` and `decode` support this format with operands of this dtype."""
    return format in (NVFP4, NVFP4_TILED, MXFP4) and dtype in (torch.bfloat16, torch.float32)


def encode(request: EncodeRequest, *, library: ctypes.CDLL | None = None) -> Encoded:
    """Quantise a matrix; same result as `reference.encode`; requires `covers`."""
    return encode_with((library or LIBRARY.get()).megalowbit_encode, request)


def decode(request: DecodeRequest, *, library: ctypes.CDLL | None = None) -> Tensor:
    """Codes × block scale; same result as `reference.decode`; requires `covers`."""
    return decode_with((library or LIBRARY.get()).megalowbit_decode, request)


def scale_and_bias(
    product: Tensor, scale: float, bias: Tensor | None, out: Tensor, *, library: ctypes.CDLL | None = None
) -> Tensor:
    """Write cast(product · scale + bias) to `out` and return it; each operation is rounded to fp32.

    Args:
        product: fp32, bf16 or fp16 (m, n).
        scale: rounded to fp32.
        bias: floating (n,), or `None`.
        out: fp32, bf16 or fp16 (m, n), last stride 1; `product` itself, or not overlapping it.
        library: a library to be tested; `None`: the one in use.
    """
    assert product.shape == out.shape, (product.shape, out.shape)
    assert out.stride(1) == 1 or out.shape[1] <= 1, out.stride()
    product = product.resolve_neg() if product.stride(1) == 1 else product.contiguous().resolve_neg()
    if bias is not None:
        assert bias.shape == out.shape[1:], (bias.shape, out.shape)
        bias = bias.detach().to(torch.float32).contiguous().resolve_neg()
    arguments = ctypes.c_float(scale), ctypes.c_void_p(address(bias)), ctypes.c_int64(out.stride(0))
    (library or LIBRARY.get()).megalowbit_scale_and_bias(ctypes.byref(arguments_of(product, out)), *arguments)
    return out


def column_sums(matrix: Tensor, *, library: ctypes.CDLL | None = None) -> Tensor:
    """Sums over the rows of an fp32, bf16 or fp16 matrix (m, n): fp32 (n,).

    The order of additions depends only on m.
    """
    matrix = matrix.resolve_neg() if matrix.stride(1) == 1 else matrix.contiguous().resolve_neg()
    rows, cols = matrix.shape
    out = torch.empty(cols, dtype=torch.float32, device="cpu")
    partial = torch.empty(-(-rows // SUM_ROWS), cols, dtype=torch.float32, device="cpu")
    arguments = ctypes.c_int64(SUM_ROWS), ctypes.c_void_p(address(partial))
    (library or LIBRARY.get()).megalowbit_column_sums(ctypes.byref(arguments_of(matrix, out)), *arguments)
    return out


def _answers(library: ctypes.CDLL) -> dict[str, int]:
    use = functools.partial
    return answers(
        use(encode, library=library),
        use(decode, library=library),
        use(scale_and_bias, library=library),
        use(column_sums, library=library),
    )


LIBRARY = KernelLibrary(
    Path(__file__).with_suffix(".c"), ("tasks.h", "codes.h", "lanes.h"), _answers, KNOWN_BITS
)
