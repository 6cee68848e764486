"""What quantisation did to a tensor, counted; s is an element's decoded scale, M the largest element.

- saturated: |x| > M·s, clipped. upper_half: |x| > M/2·s. Both compare x · encode with 2⁻²⁰ of slack, since
  a block's own maximum may exceed M by fp32 rounding alone.
- underflow: x ≠ 0, and its code or its block's scale is 0.
- nonfinite: x is an infinity or a NaN. Finite neighbours are lost with it, yet count nowhere else.
- saturated_scales: E4M3 scales above 448 before the clamp (same slack): only where the tensor's maximum came
  from elsewhere. zero_blocks: blocks whose scale is 0 (E8M0 and signed scales have no 0: whose elements are).
- squared_error Σ(x - q)² and squared_norm Σx² leave out spoiled blocks, so they stay finite.

Padding is no element, and a block of padding alone does not exist. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalowbit.formats.block_scale import SLACK, BlockScales

COUNT_NAMES = (
    "elements",
    "saturated",
    "upper_half",
    "underflow",
    "nonfinite",
    "blocks",
    "saturated_scales",
    "zero_blocks",
)
ERROR_NAMES = ("squared_error", "squared_norm")


def no_counts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts and error of a tensor without elements."""
    return (
        torch.zeros(len(COUNT_NAMES), dtype=torch.int64, device=device),
        torch.zeros(len(ERROR_NAMES), dtype=torch.float64, device=device),
    )


def count_errors(
    x: Tensor, scaled: Tensor, decoded: Tensor, scales: BlockScales, amax: Tensor, largest: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Compare a matrix with what its codes decode to.

    Args:
        x: fp32 (rows, cols), without padding.
        scaled: fp32, same shape: x times its block's encode scale.
        decoded: fp32, same shape: codes × block scale, NaN throughout spoiled blocks.
        scales: of the blocks.
        amax: fp32, the blocks' largest magnitudes, same shape as the scales.
        largest: M, the largest element of the format; of each element, (rows, cols), where formats differ.

    Returns:
        int64 (8,) in the order of `COUNT_NAMES` and float64 (2,) in the order of `ERROR_NAMES`.
    """
    magnitude = scaled.abs()
    has_no_zero = isinstance(largest, Tensor) or scales.codes.dtype == torch.float8_e8m0fnu
    values = decoded if scales.tensor_scale is None else decoded * scales.tensor_scale
    if has_no_zero:
        is_zero_scale = amax == 0
    elif scales.codes.dtype == torch.float8_e4m3fn:
        is_zero_scale = scales.decoded == 0
    else:
        is_zero_scale = scales.encode == 0  # where a tensor has one scale, `decoded` is 1
    counts = torch.stack(
        [
            torch.full((), x.numel(), dtype=torch.int64, device=x.device),
            (magnitude > largest * SLACK).sum(),
            (magnitude > largest / 2 * SLACK).sum(),
            ((x != 0) & (decoded == 0) & ~values.isnan()).sum(),
            (~x.isfinite()).sum(),
            torch.full((), scales.decoded.numel(), dtype=torch.int64, device=x.device),
            scales.overflows.sum(),
            is_zero_scale.sum(),
        ]
    )
    exact = torch.where(values.isnan(), 0.0, x).to(torch.float64)
    difference = exact - values.nan_to_num(nan=0.0).to(torch.float64)
    return counts, torch.stack([difference.square().sum(), exact.square().sum()])
