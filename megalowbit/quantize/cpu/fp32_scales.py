"""The CPU kernels for INT8, INT4 and small floats with fp32 scales: `fp32_scales.c`.

They support one scale per tensor, blocks of 16 to 128 elements of a row, tiles, and mixed blocks, from fp32,
bf16 and fp16 with any strides, bit-equal to `reference`. Scales from the mean magnitude use plain torch.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megalowbit.c_library import KernelLibrary
from megalowbit.formats.block_format import BlockFormat
from megalowbit.quantize.cpu.kernel_arguments import DTYPES, ELEMENTS, decode_with, encode_with
from megalowbit.quantize.cpu.known_bits import KNOWN_BITS_8BIT, answers_8bit
from megalowbit.quantize.encoding import DecodeRequest, Encoded, EncodeRequest

LARGEST_BLOCK = 128  # elements along a row


def is_for(format: BlockFormat) -> bool:
    """Whether these kernels, rather than `cpu.fp4`, are responsible for a format."""
    return format.scale in ("fp32", "signed_fp32") and format.element in ELEMENTS


def covers(format: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `encode` and `decode` support this format with operands of this dtype."""
    rows, cols = format.block or (1, 16)
    fits = rows in (1, 16) and cols in (16, 32, 64, LARGEST_BLOCK)
    return is_for(format) and fits and dtype in DTYPES


def encode(request: EncodeRequest, *, library: ctypes.CDLL | None = None) -> Encoded:
    """Quantise a matrix; same result as `reference.encode`; requires `covers`."""
    return encode_with((library or LIBRARY.get()).megalowbit_encode_8bit, request)


def decode(request: DecodeRequest, *, library: ctypes.CDLL | None = None) -> Tensor:
    """Codes × block scale; same result as `reference.decode`; requires `covers`."""
    return decode_with((library or LIBRARY.get()).megalowbit_decode_8bit, request)


def _answers(library: ctypes.CDLL) -> dict[str, int]:
    return answers_8bit(
        functools.partial(encode, library=library), functools.partial(decode, library=library)
    )


# Separate from the library of `fp4`: code that uses FP4 only does not wait for it. Runs of low-bit recipes
# load both before the first step.
LIBRARY = KernelLibrary(
    Path(__file__).with_suffix(".c"),
    ("elements.h", "tasks.h", "codes.h", "lanes.h"),
    _answers,
    KNOWN_BITS_8BIT,
)
