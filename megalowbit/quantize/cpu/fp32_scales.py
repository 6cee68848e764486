"""The fast path of CPUs for INT8, INT4 and small floats under fp32 scales: `fp32_scales.c`.

It covers one scale for the tensor, blocks of 16 to 128 elements of a row, tiles, and blocks that are INT8 or
E5M2, from fp32, bf16 and fp16 of any strides, bit for bit as `reference`. Scales from the mean magnitude stay
with plain torch. It is a library of its own, compiled, checked and called as that of `kernels_cpu`, so that a
run with FP4 only does not wait for it.
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
from megalowbit.formats.block_format import BlockFormat
from megalowbit.quantize.cpu.job import DTYPES, ELEMENTS, decode_with, encode_with
from megalowbit.quantize.cpu.known_bits import KNOWN_BITS_8BIT, answers_8bit
from megalowbit.quantize.encoding import Encoded, Encoding

SOURCE = Path(__file__).with_suffix(".c")
HEADERS = ("elements.h", "tasks.h", "codes.h", "lanes.h")
LARGEST_BLOCK = 128  # elements of a row


def why_unavailable() -> str | None:
    """Why there is no library, with the remedy; `None` if there is one. The first call compiles it."""
    return _loaded()[1]


def is_for(format: BlockFormat) -> bool:
    """Whether a format is one of these, rather than one of `kernels_cpu`."""
    return format.scale in ("fp32", "signed_fp32") and format.element in ELEMENTS


def supports(dtype: torch.dtype, encoding: Encoding, operand_dtype: torch.dtype | None = None) -> bool:
    """Whether `encode` takes this; what it does not take, `reference` does."""
    is_covered = dtype in DTYPES and encoding.scale_from == "amax"
    return is_covered and supports_decoding(encoding.format, operand_dtype or torch.bfloat16)


def supports_decoding(format: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `decode` takes this."""
    rows, cols = format.block or (1, 16)
    fits = rows in (1, 16) and cols in (16, 32, 64, LARGEST_BLOCK)
    return is_for(format) and fits and dtype in DTYPES


def encode(x: Tensor, encoding: Encoding, *, library: ctypes.CDLL | None = None, **options: Any) -> Encoded:
    """Quantise a matrix that `supports` agrees to; arguments as of `reference.encode`."""
    return encode_with((library or _library()).megalowbit_encode_8bit, x, encoding, **options)


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
    function = (library or _library()).megalowbit_decode_8bit
    return decode_with(function, codes, scales, format, rows, cols, dtype, transpose=transpose)


def _library() -> ctypes.CDLL:
    library, reason = _loaded()
    assert library is not None, reason
    return library


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or `None` and the reason, of which `backends` warns."""
    return load_checked(SOURCE, HEADERS, _answers, KNOWN_BITS_8BIT)


@_disable_current_modes()
def _answers(library: ctypes.CDLL) -> dict[str, int]:
    return answers_8bit(
        functools.partial(encode, library=library), functools.partial(decode, library=library)
    )
