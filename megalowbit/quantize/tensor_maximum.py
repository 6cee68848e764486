"""The largest magnitude by which a tensor's scale is chosen, taken apart from quantising.

A tensor in shards needs the largest number of all shards before any of them can be quantised: each rank asks
here, the ranks take the maximum, and the quantiser gets it as `tensor_amax`. The result is what the quantiser
would find itself: under block scales a block with an infinity or a NaN does not count, under the tensor's
only scale it counts as infinite, which spoils the tensor. So no result is NaN, and a maximum may be taken by
a library whose MAX drops NaN.

Not covered: scales from the mean magnitude, and quantisers with an arithmetic of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.quantize.encoding import Encoding
from megalowbit.quantize.hadamard import hadamard
from megalowbit.quantize.quantizer import BlockQuantizer, Quantizer


def needs_maximum(quantizer: Quantizer) -> bool:
    """Whether a quantiser's result depends on the largest magnitude of the whole tensor.

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
    format = quantizer.encoding.format
    return format.block is None or format.scale == "e4m3"


@torch.no_grad()
def tensor_maximum(x: Tensor, encoding: Encoding, signs: int | None = None) -> Tensor:
    """The largest magnitude times `q_scalar`, of what the quantiser will see.

    Args:
        x: floating (rows, cols), any strides, may be empty; blocks lie along the columns.
        encoding: of the quantiser.
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
