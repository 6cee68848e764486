"""The largest magnitude and the sum of squares of a tensor, in float64: C on CPUs, plain torch otherwise.

The C pass reads a tensor once, as it lies in memory; plain torch reads it twice, in pieces. Both give the
same largest magnitude, which a quantiser takes as its `tensor_amax`, and sums equal to within 1e-12. Who
serves a tensor is decided as in `backends`, `MEGALOWBIT_BACKEND` included; what goes through plain torch on a
CPU is said once in the log.

Not covered: a tensor whose axes do not merge into two is copied first (a slice along two axes of three).
"""

from __future__ import annotations

import functools
import logging
import os
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.quantize.backends import BACKEND_VARIABLE, backend_of
from megalowbit.quantize.cpu import moments as kernels_cpu_moments

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
    """Largest magnitude and sum of squares; nothing waits for the device.

    Args:
        x: floating, any shape and strides, may be empty.
    """
    matrix = in_memory_order(x.detach())
    if backend_of(matrix) == "c" and _has_kernel(matrix.dtype, os.environ.get(BACKEND_VARIABLE, "")):
        return Moments(*kernels_cpu_moments.moments(matrix).unbind())
    if matrix.numel() == 0:
        return Moments(*torch.zeros(2, dtype=torch.float64, device=x.device).unbind())
    low, high = torch.aminmax(matrix)
    return Moments(torch.maximum(low.neg(), high).to(torch.float64), _sum_of_squares(matrix.flatten()))


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
    if not kernels_cpu_moments.supports(dtype):
        logger.info("looking at %s on cpu with plain torch operations: no kernel covers it", dtype)
        return False
    reason = kernels_cpu_moments.why_unavailable()
    if reason and forced:
        raise UserError(f"{BACKEND_VARIABLE}={forced} cannot be used to look at operands: {reason}")
    if reason:
        logger.warning("operands are looked at with plain torch operations, which is slower: %s", reason)
    return reason is None
