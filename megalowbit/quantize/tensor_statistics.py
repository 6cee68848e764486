"""Statistics of a whole tensor: the maximum its scale is chosen by, and moments; apart from quantising it.

`tensor_maximum` is for shards: each rank asks here, the ranks take the largest of their answers, and the
quantizer gets it as `tensor_amax`. The result is what the quantizer would find itself: under block scales a
block with an infinity or a NaN does not count, under the tensor's only scale it counts as infinite, which
spoils the tensor. No result is NaN: a maximum may be taken by a library whose MAX drops NaN.
Not covered: scales from the mean magnitude, and quantizers with an arithmetic of their own.

`tensor_moments` finds the largest magnitude and the sum of squares in float64: by C on CPUs, which reads a
tensor once, as it lies in memory; by plain torch otherwise, which reads it twice, in pieces. Both give the
same largest magnitude and sums equal to within 1e-12. Who serves a tensor is decided as in `backends`,
`MEGALOWBIT_BACKEND` included; what goes through plain torch on a CPU is said once in the log. A tensor whose
axes do not merge into two is copied first (a slice along two axes of three).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.c_library import KernelLibrary, address
from megalowbit.errors import UserError
from megalowbit.quantize.backends import BACKEND_VARIABLE, backend_of
from megalowbit.quantize.cpu.kernel_arguments import DTYPES, arguments_of
from megalowbit.quantize.cpu.known_bits import KNOWN_MOMENTS, answers_moments
from megalowbit.quantize.encoding import Encoding
from megalowbit.quantize.hadamard import hadamard
from megalowbit.quantize.quantizer import BlockQuantizer, Quantizer

CPU_PIECE = 2**16  # elements whose float64 copy stays in cache: 512 KiB
PIECE = 2**22  # elements elsewhere: few launches, 32 MiB
logger = logging.getLogger("megalowbit")


class Moments(NamedTuple):
    """Of all elements, each float64, 0-dim, on the tensor's device.

    Attributes:
        largest: magnitude; NaN where an element is.
        squares: their sum; not finite where an element is not.
    """

    largest: Tensor
    squares: Tensor


@torch.no_grad()
def tensor_moments(x: Tensor) -> Moments:
    """Largest magnitude and sum of squares of any floating tensor; nothing waits for the device."""
    matrix = in_memory_order(x.detach())
    if backend_of(matrix) == "c" and _has_kernel(matrix.dtype, os.environ.get(BACKEND_VARIABLE, "")):
        return Moments(*moments_on_cpu(matrix).unbind())
    if matrix.numel() == 0:
        return Moments(*torch.zeros(2, dtype=torch.float64, device=x.device).unbind())
    low, high = torch.aminmax(matrix)
    return Moments(torch.maximum(low.neg(), high).to(torch.float64), _sum_of_squares(matrix.flatten()))


def moments_on_cpu(matrix: Tensor, *, library: ctypes.CDLL | None = None) -> Tensor:
    """Largest magnitude, NaN where there is one, and sum of squares to within 2.4e-13 of itself, by C.

    Args:
        matrix: fp32, bf16 or fp16 (rows, cols), any strides, may be empty.
        library: other than the one in use, to be checked.

    Returns:
        float64 (2,), which do not depend on the number of threads.
    """
    matrix = matrix.detach().resolve_neg()
    found = torch.empty(2, dtype=torch.float64, device="cpu")
    call = (library or LIBRARY.get()).megalowbit_moments
    if call(ctypes.byref(arguments_of(matrix, None)), ctypes.c_void_p(address(found))):
        raise MemoryError(f"not enough memory to read a matrix of {matrix.shape[0]} × {matrix.shape[1]}")
    return found


def in_memory_order(x: Tensor) -> Tensor:
    """All elements as a matrix whose rows follow memory: one row where they lie densely.

    A view where two axes describe them, as with a slice of columns; a copy in one row otherwise.
    """
    x = x.squeeze()
    strides = x.stride()
    # What is repeated comes first.
    ordered = x.permute(sorted(range(x.ndim), key=lambda axis: (strides[axis] != 0, -strides[axis])))
    sizes: list[int] = []
    stride_before = -1
    for size, stride in zip(ordered.shape, ordered.stride(), strict=True):
        if stride_before == size * stride:
            sizes[-1] *= size
        else:
            sizes.append(size)
        stride_before = stride
    if x.numel() == 0 or len(sizes) > 2:
        return ordered.contiguous().view(1, -1)
    return ordered.view([1] * (2 - len(sizes)) + sizes)


def _sum_of_squares(flat: Tensor) -> Tensor:
    sums = []
    for piece in flat.split(CPU_PIECE if flat.device.type == "cpu" else PIECE):
        wide = piece.to(torch.float64)
        sums.append(torch.dot(wide, wide))
    return torch.stack(sums).sum()


@functools.lru_cache(maxsize=64)  # what it says is said once for each
def _has_kernel(dtype: torch.dtype, forced: str) -> bool:
    """Whether the C pass takes this dtype."""
    if dtype not in DTYPES:
        logger.info("looking at %s on cpu with plain torch operations: no kernel covers it", dtype)
        return False
    reason = LIBRARY.why_unavailable()
    if reason and forced:
        raise UserError(f"{BACKEND_VARIABLE}={forced} cannot be used to look at operands: {reason}")
    if reason:
        logger.warning("operands are looked at with plain torch operations, which is slower: %s", reason)
    return reason is None


def needs_maximum(quantizer: Quantizer) -> bool:
    """Whether a quantizer's result depends on the largest magnitude of the whole tensor.

    Raises:
        UserError: it depends on the whole tensor in another way, so that shards cannot be quantised alone.
    """
    if quantizer.is_identity:
        return False
    if not isinstance(quantizer, BlockQuantizer) or quantizer.encoding.scale_from == "mean":
        raise UserError(
            f"quantizer {quantizer.name!r} needs the whole tensor at once: "
            "use another one where tensor parallelism cuts the operands, such as nvfp4e2m1b"
        )
    return quantizer.encoding.format.has_tensor_scale


@torch.no_grad()
def tensor_maximum(x: Tensor, encoding: Encoding, signs: int | None = None) -> Tensor:
    """The largest magnitude times `q_scalar`, of what the quantizer will see.

    Args:
        x: floating (rows, cols), any strides, may be empty; blocks lie along the columns.
        encoding: of the quantizer.
        signs: of a Hadamard transform along the columns, whose number then is a multiple of 16.

    Returns:
        fp32, 0-dim, on x's device; never NaN.
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    if signs is not None:
        x = hadamard(x.to(torch.float32), signs)
    if x.dtype == torch.float64:
        x = x.to(torch.float32)
    if encoding.format.block is None:
        largest = x.abs().amax().to(torch.float32) * encoding.q_scalar
        return torch.where(largest.isfinite(), largest, torch.inf)
    largest = _block_maxima(x, encoding.format.block).to(torch.float32) * encoding.q_scalar
    return torch.where(largest.isfinite(), largest, 0.0).amax()


def _block_maxima(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block, NaN where the block has one."""
    rows, cols = block
    padding = (0, -x.shape[1] % cols, 0, -x.shape[0] % rows)
    if any(padding):
        x = torch.nn.functional.pad(x, padding)
    return x.abs().unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).amax((1, 3))


def _answers(library: ctypes.CDLL) -> dict[str, int]:
    return answers_moments(functools.partial(moments_on_cpu, library=library))


# A library apart from those of `quantize.cpu`: only runs that look at operands wait for it.
LIBRARY = KernelLibrary(
    Path(__file__).with_name("cpu") / "moments.c",
    ("tasks.h", "codes.h", "lanes.h"),
    _answers,
    KNOWN_MOMENTS,
)
