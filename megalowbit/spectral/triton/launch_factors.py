"""Launches the kernels for low-rank factors, `triton.factors`; imports Triton at the first launch.

They take matrices in bf16 of up to 64 directions, on devices whose quantizers use Triton kernels.
The host never waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.quantize.backends import backend_of
from megalowbit.quantize.triton.launch_arguments import as_stored, is_interpreted, launch

MOST_DIRECTIONS = 64
LEAST_DIRECTIONS = 16  # of a tile; a product of tiles needs as many
PARTS = 32  # most Gram matrices of a part; one program adds them
GRAM_TILE = 128  # columns of a tile
ROWS_TILE = 64
PIECE = 1024  # elements of a row


class OrthonormalRows(NamedTuple):
    """See `orthogonal.Orthonormal`; `rows` are bf16."""

    rows: Tensor
    is_independent: Tensor
    fallbacks: Tensor


class Maxima(NamedTuple):
    """What NVFP4's tensor scales follow from; each fp32, 0-dim.

    Attributes:
        left: Uᵀ's largest magnitude.
        right: Vᵀ's.
        residual: 0; `launch_residual.residual` raises it, so it serves one residual.
    """

    left: Tensor
    right: Tensor
    residual: Tensor


class Ordered(NamedTuple):
    """Uᵀ (k, rows), the values (k,), Vᵀ (k, cols), directions to start from next (k, cols), and maxima."""

    left: Tensor
    values: Tensor
    right: Tensor
    directions: Tensor
    maxima: Maxima


def covers(rows: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take these matrices: `rows` (k, …) and others, all bf16."""
    matrices = (rows, *others)
    return (
        0 < len(rows) <= MOST_DIRECTIONS
        and all(each.dtype == torch.bfloat16 and each.numel() and not each.is_neg() for each in matrices)
        and backend_of(*matrices) == "triton"
    )


def cholesky_rows(
    rows: Tensor, *, least: float, shift: float, strong_shift: float, share: float
) -> OrthonormalRows:
    """`orthogonal.cholesky_rows` without a wait, of rows (k, n) with any strides; requires `covers`.

    Args:
        rows: (k, n).
        least: see there.
        shift: of the diagonal.
        strong_shift: of the diagonal if the factorisation fails with `shift`.
        share: least part of a row's square that is orthogonal to the rows before it.
    """
    from megalowbit.spectral.triton import factors as kernels

    (k, n), device = rows.shape, rows.device
    rank = tile_rank(k)
    tiles = -(-n // (GRAM_TILE * PARTS))  # of a part
    parts = -(-n // (GRAM_TILE * tiles))
    matrix = {
        "x": as_stored(rows),
        "k": k,
        "n": n,
        "row_stride": rows.stride(0),
        "col_stride": rows.stride(1),
        "IS_WIDE": is_interpreted(),
        "RANK": rank,
    }
    grams = torch.empty(parts, rank, rank, dtype=torch.float32, device=device)
    exponents = torch.empty(parts, dtype=torch.int32, device=device)
    launch(
        kernels.gram_kernel,
        parts,
        device,
        **matrix,
        grams=grams,
        exponents=exponents,
        tiles=tiles,
        TILE=GRAM_TILE,
    )
    transform = torch.empty(rank, rank, dtype=torch.float32, device=device)
    exponent = torch.empty((), dtype=torch.int32, device=device)
    independent = torch.empty(rank, dtype=torch.uint8, device=device)
    fallbacks = torch.empty((), dtype=torch.int64, device=device)
    launch(
        kernels.transform_kernel,
        1,
        device,
        grams=grams,
        exponents=exponents,
        transform=transform,
        exponent=exponent,
        independent=independent,
        fallbacks=fallbacks,
        parts=parts,
        k=k,
        least=least,
        SHIFT=shift,
        STRONG_SHIFT=strong_shift,
        SHARE=share,
        RANK=rank,
    )
    out = torch.empty(k, n, dtype=rows.dtype, device=device)
    launch(
        kernels.rows_kernel,
        -(-n // ROWS_TILE),
        device,
        **matrix,
        transform=transform,
        exponent=exponent,
        out=as_stored(out),
        TILE=ROWS_TILE,
    )
    return OrthonormalRows(out, independent.narrow(0, 0, k).view(torch.bool), fallbacks)


def ordered(left: Tensor, product: Tensor, directions: Tensor, *, least: float) -> Ordered:
    """Directions in the order of their strength; requires `covers`.

    Args:
        left: Uᵀ (k, rows), contiguous.
        product: UᵀM (k, cols), contiguous.
        directions: those that U was computed from, (k, cols); kept where the matrix has none.
        least: share of the longest row of `product` from which on a direction counts.
    """
    from megalowbit.spectral.triton import factors as kernels

    (k, rows), cols = left.shape, product.shape[1]
    norms, values = (torch.empty(k, dtype=torch.float32, device=left.device) for _ in range(2))
    stored = as_stored(product)
    maxima = torch.empty(kernels.CLEARED.value, dtype=torch.int32, device=left.device)  # bits of fp32
    launch(kernels.norms_kernel, k, left.device, x=stored, norms=norms, maxima=maxima, n=cols, TILE=PIECE)
    new = [torch.empty_like(each) for each in (left, product, product)]
    pieces = -(-rows // PIECE) - (-cols // PIECE)
    launch(
        kernels.order_kernel,
        k * pieces,
        left.device,
        norms=norms,
        left=as_stored(left),
        product=stored,
        directions=as_stored(directions.contiguous()),
        values=values,
        ordered_left=as_stored(new[0]),
        right=as_stored(new[1]),
        next_directions=as_stored(new[2]),
        maxima=maxima,
        rows=rows,
        cols=cols,
        k=k,
        least=least,
        TILE=PIECE,
        RANK=tile_rank(k),
    )
    found = maxima.view(torch.float32).view(-1, kernels.SPACING.value).select(1, 0).unbind()
    return Ordered(new[0], values, new[1], new[2], Maxima(*found[:3]))


def tile_rank(k: int) -> int:
    """K rounded up to a power of two that tiles may have."""
    return max(LEAST_DIRECTIONS, 1 << (k - 1).bit_length())
