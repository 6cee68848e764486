"""What quantisation did to a tensor, counted: clipping, underflow, damage, squared error.

Definitions, with s the decoded scale of an element's block (block scale × tensor scale):

- saturated: |x| > 6·s, clipped. upper_half: |x| > 3·s, as coarse as the format gets, but not clipped.
  Both compare with 2⁻²⁰ of slack, since x·(1/s) of a block's own maximum may exceed 6 by fp32 rounding alone.
- underflow: x ≠ 0 and its code or its block's scale is 0. Elements of a block with scale 0 count here only.
- nonfinite: x is an infinity or a NaN. Finite neighbours in the same block are lost too, yet count nowhere
  else.
- saturated_scales: blocks whose scale exceeded 448 before the clamp (same slack): possible only where the
  tensor's maximum came from elsewhere. zero_blocks: blocks whose scale is 0.
- squared_error Σ(x - q)² and squared_norm Σx² leave out blocks with non-finite elements, so they stay finite.

Padding is no element, and a block of padding alone does not exist. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalowbit.formats.block_scale import BLOCK_SIZE, E4M3_MAX, BlockScales
from megalowbit.formats.element import ElementFormat
from megalowbit.formats.packing import in_pieces, unpack_values

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
SLACK = 1 + 2.0**-20


def no_counts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts and error of a tensor without elements."""
    return (
        torch.zeros(len(COUNT_NAMES), dtype=torch.int64, device=device),
        torch.zeros(len(ERROR_NAMES), dtype=torch.float64, device=device),
    )


def count_errors(
    blocks: Tensor, packed: Tensor, scales: BlockScales, element: ElementFormat, num_elements: int
) -> tuple[Tensor, Tensor]:
    """Compare blocks with what their codes decode to.

    Args:
        blocks: floating (blocks, 16), zero where padded.
        packed: uint8, 1-D, their codes.
        scales: their scales.
        element: format of the codes.
        num_elements: elements that are not padding.

    Returns:
        int64 (8,) in the order of `COUNT_NAMES` and float64 (2,) in the order of `ERROR_NAMES`.
    """
    # Looking costs nothing on a CPU and saves three passes; elsewhere it would wait for the device.
    is_clean = blocks.device.type == "cpu" and not scales.decoded.isnan().any()
    decode = scales.decoded * scales.tensor_scale
    scratch: list[Tensor] = []
    sums: list[Tensor] = []  # six for each piece
    for chunk, codes, encode, chunk_decode in in_pieces(
        len(blocks), blocks.device, blocks, packed, scales.encode, decode
    ):
        scratch = scratch or [torch.empty(chunk.shape, device=chunk.device) for _ in range(2)]
        spare = [each[: len(chunk)] for each in scratch]
        exact = chunk.to(torch.float32)
        values = unpack_values(codes, element).view(-1, BLOCK_SIZE).mul_(chunk_decode)
        sums += _count_elements(exact, encode, values, element, spare, is_clean)
        sums += _squares(exact, values, is_clean)
    totals = torch.stack(sums).view(-1, 6).sum(0)  # fp64, whole numbers below 2⁵³
    counts = torch.stack(
        [
            torch.full_like(totals[0], num_elements),
            *totals[:4],
            torch.full_like(totals[0], blocks.shape[0]),
            torch.gt(scales.unclamped, E4M3_MAX * SLACK).sum(),
            torch.eq(scales.decoded, 0).sum(),
        ]
    )
    return counts.to(torch.int64), totals[4:]


def _count_elements(
    chunk: Tensor, encode: Tensor, values: Tensor, element: ElementFormat, spare: list[Tensor], is_clean: bool
) -> list[Tensor]:
    """Saturated, upper half, underflow and non-finite elements, fp64."""
    # Zeros and ones in fp32, not bool: four times as fast, and exact for a piece on a CPU (< 2²⁴ elements).
    one = torch.float32 if chunk.device.type == "cpu" else torch.float64
    magnitude, flag = spare
    torch.mul(chunk, encode, out=magnitude).abs_()
    saturated = torch.gt(magnitude, element.max * SLACK, out=flag).sum(dtype=one)
    upper_half = magnitude.gt_(element.max / 2 * SLACK).sum(dtype=one)
    torch.ne(chunk, 0, out=flag)
    underflow = flag.mul_(torch.eq(values, 0, out=magnitude)).sum(dtype=one)
    nonfinite = torch.zeros_like(saturated)
    if not is_clean:
        torch.sub(chunk, chunk, out=flag)  # inf - inf and NaN - NaN are NaN, and NaN ≠ 0
        nonfinite = flag.ne_(0).sum(dtype=one)
    return [each.to(torch.float64) for each in (saturated, upper_half, underflow, nonfinite)]


def _squares(chunk: Tensor, values: Tensor, is_clean: bool) -> list[Tensor]:
    """Squared error and squared norm, fp64."""
    if not is_clean:
        chunk = (chunk + (values - values)).nan_to_num_(nan=0.0)  # NaN throughout a spoiled block
        values = values.nan_to_num_(nan=0.0)
    exact = chunk.flatten().to(torch.float64)
    squared_norm = torch.dot(exact, exact)
    difference = exact.copy_(values.sub_(chunk).view(-1))
    return [torch.dot(difference, difference), squared_norm]
