"""The random Hadamard transform: H = diag(signs) · H16 / 4, along rows, in groups of 16.

H is orthogonal. Applied to both operands of a product along the summed axis it cancels out, but it spreads
outliers over their group before quantisation (NVIDIA, "Pretraining LLMs with NVFP4", arXiv:2509.25149). The
butterfly in fp32 has a fixed order of additions, so every device computes the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalowbit.formats.block_format import GROUP


def hadamard(x: Tensor, signs: int) -> Tensor:
    """Transform fp32 (rows, cols), cols a multiple of 16: fp32, same shape.

    If bit j of the 16-bit `signs` is set, element j of each group is negated first.
    """
    return (_butterfly(x.unflatten(1, (-1, GROUP)) * _flips(signs, x)) * 0.25).flatten(1)


def inverse_hadamard(x: Tensor, signs: int) -> Tensor:
    """The inverse of `hadamard` with these signs."""
    groups = _butterfly(x.unflatten(1, (-1, GROUP))) * 0.25  # H16 / 4 is its own inverse
    return (groups * _flips(signs, x)).flatten(1)


def _flips(signs: int, like: Tensor) -> Tensor:
    """1, or -1 where a bit is set, (16,); computed on the device, as graphs capture no copy from the host."""
    bits = torch.arange(GROUP, dtype=torch.int32, device=like.device)
    return (1 - 2 * ((signs >> bits) & 1)).to(torch.float32)


def _butterfly(groups: Tensor) -> Tensor:
    """Multiply (rows, groups, 16) by H16."""
    for half in (1, 2, 4, 8):
        pairs = groups.unflatten(2, (-1, 2, half))
        low, high = pairs.unbind(3)
        groups = torch.stack([low + high, low - high], dim=3).flatten(2)
    return groups
