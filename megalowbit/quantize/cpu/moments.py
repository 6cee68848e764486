"""The largest magnitude and the sum of squares on CPUs: `moments.c`, in one pass over memory.

It takes fp32, bf16 and fp16 of any strides. It is a library of its own, compiled, checked and called as that
of `kernels_cpu`: only runs that look at operands wait for it. `tensor_moments` decides who uses it.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megalowbit.c_library import load_checked
from megalowbit.quantize.cpu.job import DTYPES, address, job_of
from megalowbit.quantize.cpu.known_bits import KNOWN_MOMENTS, answers_moments

SOURCE = Path(__file__).with_suffix(".c")
HEADERS = ("tasks.h", "codes.h", "lanes.h")


def why_unavailable() -> str | None:
    """Why there is no library, with the remedy; `None` if there is one. The first call compiles it."""
    return _loaded()[1]


def supports(dtype: torch.dtype) -> bool:
    """Whether `moments` takes this."""
    return dtype in DTYPES


def moments(matrix: Tensor, *, library: ctypes.CDLL | None = None) -> Tensor:
    """The largest magnitude, NaN where there is one, and the sum of squares to within 2.4e-13 of itself.

    Args:
        matrix: fp32, bf16 or fp16 (rows, cols), any strides, may be empty.
        library: other than the one in use, to be checked.

    Returns:
        float64 (2,), which do not depend on the number of threads.
    """
    matrix = matrix.detach().resolve_neg()
    found = torch.empty(2, dtype=torch.float64, device="cpu")
    call = (library or _library()).megalowbit_moments
    if call(ctypes.byref(job_of(matrix, None)), ctypes.c_void_p(address(found))):
        raise MemoryError(f"no memory left to look at a matrix of {matrix.shape[0]} × {matrix.shape[1]}")
    return found


def _library() -> ctypes.CDLL:
    library, reason = _loaded()
    assert library is not None, reason
    return library


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or `None` and the reason, of which `tensor_moments` warns."""
    return load_checked(SOURCE, HEADERS, _answers, KNOWN_MOMENTS)


@_disable_current_modes()
def _answers(library: ctypes.CDLL) -> dict[str, int]:
    return answers_moments(functools.partial(moments, library=library))
