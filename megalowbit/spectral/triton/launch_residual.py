"""Launches the kernel for residuals, `triton.factors`; imports Triton at the first launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.quantize.triton.launch_arguments import as_stored, is_interpreted, launch, programs_of
from megalowbit.spectral.triton import launch_factors

TILE = (128, 64)  # rows and columns


class Residual(NamedTuple):
    """The difference, bf16 (rows, cols), and its `SplitTensor.residual_amax`."""

    difference: Tensor
    amax: Tensor


def covers(matrix: Tensor, tall: Tensor, flat: Tensor) -> bool:
    """Whether the kernel takes this matrix (rows, cols) and these factors, (rows, k) and (k, cols)."""
    return launch_factors.covers(flat, matrix, tall)


def residual(matrix: Tensor, tall: Tensor, flat: Tensor, amax: Tensor | None = None) -> Residual:
    """Matrix - tall · flat, rounded to bf16 once; requires `covers`.

    Args:
        matrix: (rows, cols), any strides.
        tall: (rows, k), bf16, contiguous.
        flat: (k, cols), bf16, contiguous.
        amax: memory for the maximum, fp32, 0-dim, that an earlier kernel has cleared; `None`: new memory.
    """
    from megalowbit.spectral.triton.factors import residual_kernel

    (rows, cols), device = matrix.shape, matrix.device
    out = torch.empty(rows, cols, dtype=matrix.dtype, device=device)
    if amax is None:
        amax = torch.zeros((), dtype=torch.float32, device=device)
    launch(
        residual_kernel,
        programs_of(cols, rows, TILE[1], TILE[0]),
        device,
        x=as_stored(matrix),
        tall=as_stored(tall),
        flat=as_stored(flat),
        out=as_stored(out),
        amax=amax.view(torch.int32),
        rows=rows,
        cols=cols,
        k=len(flat),
        row_stride=matrix.stride(0),
        col_stride=matrix.stride(1),
        IS_WIDE=is_interpreted(),
        TILE_ROWS=TILE[0],
        TILE_COLS=TILE[1],
        RANK=launch_factors.tile_rank(len(flat)),
    )
    return Residual(out, amax)
