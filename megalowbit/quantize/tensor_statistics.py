"""Statistics of a full tensor, separate from quantising it: the maximum for its scale, and moments.

`tensor_maximum` is for shards. Each rank computes its maximum, the ranks reduce them by MAX, and the
quantizer gets the result as `tensor_amax`. It is the number that the quantizer would compute for the full
tensor; on GPUs its kernel is used. With block scales, a block with an infinity or a NaN is ignored; with a
single scale, it makes the maximum infinite and the tensor NaN. The result is never NaN, because the MAX of
some libraries drops NaN. Not supported: scales from the mean magnitude, and `seed_compat`.

`tensor_moments` computes the largest magnitude and the sum of squares in float64. A C kernel on CPUs reads a
tensor once, in memory order; plain torch reads it twice, in pieces. Both give the same largest magnitude, and
sums equal to within 1e-12. The backend is chosen as in `backends`, including `MEGALOWBIT_BACKEND`; the use of
plain torch on a CPU is logged once. A tensor whose axes do not merge into two is copied first (a slice along
two axes of three).
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
from megalowbit.quantize.backends import BACKEND_VARIABLE, backend_of, maximum
from megalowbit.quantize.cpu.kernel_arguments import DTYPES, arguments_of
from megalowbit.quantize.cpu.known_bits import KNOWN_MOMENTS, answers_moments
from megalowbit.quantize.encoding import EncodeRequest, Encoding
from megalowbit.quantize.hadamard import hadamard
from megalowbit.quantize.quantizer import BlockQuantizer, Quantizer

CPU_PIECE = 2**16  # elements; the float64 copy, 512 KiB, stays in cache
PIECE = 2**22  # elements on other devices; few launches, and the copy takes 32 MiB
logger = logging.getLogger("megalowbit")


class Moments(NamedTuple):
    """Moments of all elements, each float64, 0-dim, on the tensor's device.

    Attributes:
        largest: largest magnitude; NaN if an element is NaN.
        squares: sum of squares; not finite if an element is not.
    """

    largest: Tensor
    squares: Tensor


@torch.no_grad()
def tensor_moments(x: Tensor) -> Moments:
    """Largest magnitude and sum of squares of any floating-point tensor, without waiting for the device."""
    matrix = in_memory_order(x.detach())
    if backend_of(matrix) == "c" and _has_kernel(matrix.dtype, os.environ.get(BACKEND_VARIABLE, "")):
        return Moments(*moments_on_cpu(matrix).unbind())
    if matrix.numel() == 0:
        return Moments(*torch.zeros(2, dtype=torch.float64, device=x.device).unbind())
    low, high = torch.aminmax(matrix)
    return Moments(torch.maximum(low.neg(), high).to(torch.float64), _sum_of_squares(matrix.flatten()))


def moments_on_cpu(matrix: Tensor, *, library: ctypes.CDLL | None = None) -> Tensor:
    """Largest magnitude (NaN if there is one) and sum of squares (relative error < 2.4e-13), computed by C.

    Args:
        matrix: fp32, bf16 or fp16 (rows, cols), any strides, may be empty.
        library: a library to be checked; `None`: the one in use.

    Returns:
        float64 (2,), independent of the number of threads.
    """
    matrix = matrix.detach().resolve_neg()
    found = torch.empty(2, dtype=torch.float64, device="cpu")
    call = (library or LIBRARY.get()).megalowbit_moments
    if call(ctypes.byref(arguments_of(matrix, None)), ctypes.c_void_p(address(found))):
        raise MemoryError(f"not enough memory to read a matrix of {matrix.shape[0]} × {matrix.shape[1]}")
    return found


def in_memory_order(x: Tensor) -> Tensor:
    """All elements as a matrix in memory order; a single row if they are contiguous.

    A view if two axes are enough, as for a slice of columns; otherwise a copy in one row.
    """
    x = x.squeeze()
    strides = x.stride()
    # expanded axes (stride 0) first
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


@functools.lru_cache(maxsize=64)  # so each message is logged once
def _has_kernel(dtype: torch.dtype, forced: str) -> bool:
    """Whether the C kernel supports this dtype."""
    if dtype not in DTYPES:
        logger.info("statistics of %s on cpu use plain torch operations: no kernel supports it", dtype)
        return False
    reason = LIBRARY.why_unavailable()
    if reason and forced:
        raise UserError(f"{BACKEND_VARIABLE}={forced} cannot be used for operand statistics: {reason}")
    if reason:
        logger.warning("operand statistics use plain torch operations, which is slower: %s", reason)
    return reason is None


def needs_maximum(quantizer: Quantizer) -> bool:
    """Whether a quantizer's result depends on the largest magnitude of the full tensor.

    Raises:
        UserError: it depends on the full tensor in another way, so shards cannot be quantised separately.
    """
    if quantizer.is_identity:
        return False
    encoding = quantizer.encoding if isinstance(quantizer, BlockQuantizer) else None
    if encoding is None or encoding.scale_from == "mean" or encoding.format.has_row_scales:
        raise UserError(
            f"quantizer {quantizer.name!r} needs the full tensor: "
            "use another one for operands sharded by tensor parallelism, such as nvfp4e2m1b"
        )
    return encoding.format.has_tensor_scale


@torch.no_grad()
def tensor_maximum(x: Tensor, encoding: Encoding, signs: int | None = None) -> Tensor:
    """The largest magnitude times `q_scalar`, after the Hadamard transform if there is one.

    Args:
        x: floating-point (rows, cols), any strides, may be empty; blocks are along the columns.
        encoding: encoding of the quantizer.
        signs: signs of a Hadamard transform along the columns, whose number then is a multiple of 16.

    Returns:
        fp32, 0-dim, on x's device; never NaN.
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    found = maximum(EncodeRequest(x, encoding, signs=signs)) if encoding.format.has_tensor_scale else None
    if found is not None:
        return found
    if signs is not None:
        x = hadamard(x.to(torch.float32), signs)
    if x.dtype == torch.float64:
        x = x.to(torch.float32)
    if encoding.format.block is None:
        low, high = torch.aminmax(x)
        largest = torch.maximum(low.neg(), high).abs().to(torch.float32) * encoding.q_scalar
        return torch.where(largest.isfinite(), largest, torch.inf)
    largest = _block_maxima(x, encoding.format.block).to(torch.float32) * encoding.q_scalar
    return torch.where(largest.isfinite(), largest, 0.0).amax()


def _block_maxima(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block; NaN if the block has one."""
    rows, cols = block
    padding = (0, -x.shape[1] % cols, 0, -x.shape[0] % rows)
    if any(padding):
        x = torch.nn.functional.pad(x, padding)
    low, high = torch.aminmax(x.unflatten(1, (-1, cols)), dim=2)  # unlike abs, without a copy of x
    return torch.maximum(low.neg(), high).abs().unflatten(0, (-1, rows)).amax(1)


def _answers(library: ctypes.CDLL) -> dict[str, int]:
    return answers_moments(functools.partial(moments_on_cpu, library=library))


# separate from the libraries of `quantize.cpu`, so only runs that need these statistics wait for its
# compilation
LIBRARY = KernelLibrary(
    Path(__file__).with_name("cpu") / "moments.c",
    ("tasks.h", "codes.h", "lanes.h"),
    _answers,
    KNOWN_MOMENTS,
)
