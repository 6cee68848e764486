"""Maxima of a full tensor, separate from quantising it: for its scale, and its largest magnitude.

`tensor_maximum` is for shards. Each rank computes its maximum, the ranks reduce them by MAX, and the
quantizer gets the result as `tensor_amax`. It is the number that the quantizer would compute for the full
tensor; on GPUs its kernel is used. With block scales, a block with an infinity or a NaN is ignored; with a
single scale, it makes the maximum infinite and the tensor NaN. The result is never NaN, because the MAX of
some libraries drops NaN. Not supported: scales from the mean magnitude, and `seed_compat`.

`largest_magnitude` knows of no format, and keeps NaN. It reads a tensor in memory order. A tensor whose axes
do not merge into two is copied first (a slice along two axes of three).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.quantize.backends import maximum
from megalowbit.quantize.encoding import EncodeRequest, Encoding
from megalowbit.quantize.hadamard import hadamard
from megalowbit.quantize.quantizer import BlockQuantizer, Quantizer


@torch.no_grad()
def largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude of any floating-point tensor, without waiting for the device.

    Returns:
        float64, 0-dim, on x's device; NaN if an element is NaN, 0 if there is none.
    """
    matrix = in_memory_order(x.detach())
    if matrix.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=x.device)
    low, high = torch.aminmax(matrix)
    return torch.maximum(low.neg(), high).abs().to(torch.float64)


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
