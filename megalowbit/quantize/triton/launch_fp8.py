"""Launches the kernels for FP8 products of MXFP4 matrices, `triton.fp8`; imports Triton at the first launch.

The host reads nothing: exponents, scales and the decision whether a product fits stay on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.quantize.encoding import BIAS, DEPTH, MANTISSA, SHIFT, Fp8Operand
from megalowbit.quantize.triton.launch_arguments import (
    as_stored,
    as_words,
    is_interpreted,
    launch,
    programs_of,
    unpacking,
    writing,
)

WORD_TILE = (16, 32)  # rows and words of eight codes
TALL_WORD_TILE = (64, 8)
PRODUCT_TILE = (64, 32, 64)  # m, n, k; a square one spills registers on Blackwell
PROGRAMS = 528  # most programs of a product: four for each multiprocessor of an H200


class Fp8Side(NamedTuple):
    """An operand of a product: its codes and scales, and whether the product takes its transpose.

    Attributes:
        codes: MXFP4, as stored.
        scales: as stored.
        exponents: `Encoded.exponents`.
        shape: (rows, cols) as stored.
        dtype: E4M3 or E5M2, in which it was multiplied.
        transpose: whether the product takes its transpose.
    """

    codes: Tensor
    scales: Tensor
    exponents: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    transpose: bool


def decode(
    codes: Tensor,
    scales: Tensor,
    exponents: Tensor,
    rows: int,
    cols: int,
    *,
    dtype: torch.dtype,
    transpose: bool,
) -> Fp8Operand:
    """See `backends.decode_fp8`."""
    from megalowbit.quantize.triton import fp8 as kernels

    device = codes.device
    out = torch.empty((cols, rows) if transpose else (rows, cols), dtype=dtype, device=device)
    out_scale = torch.empty((), dtype=torch.float32, device=device)
    packed, programs = unpacking(codes, rows, transpose, WORD_TILE, TALL_WORD_TILE)
    launch(
        kernels.decode_kernel,
        programs,
        device,
        **packed,
        **writing(out, transpose),
        scales=scales.contiguous().view(torch.uint8),
        exponents=exponents,
        MANTISSA=MANTISSA[dtype],
        FP8_BIAS=BIAS[dtype],
        SHIFT=SHIFT[dtype],
        REACH=DEPTH[dtype],
        cols=cols,
        out_scale=out_scale,
    )
    return Fp8Operand(out, out_scale)


def correct(product: Tensor, left: Fp8Side, right: Fp8Side, counts: Tensor) -> None:
    """Overwrite an FP8 product with the exact one, if the exponents of its operands do not fit.

    Args:
        product: contiguous (m, n), fp32, bf16 or fp16.
        left: (m, k), or (k, m) with `transpose`.
        right: (k, n), or (n, k) with `transpose`.
        counts: int32 (2,): the first is increased by 1, the second too if the product is overwritten.
    """
    from megalowbit.quantize.triton import fp8 as kernels

    (m, n), k = product.shape, left.shape[0 if left.transpose else 1]
    tile_m, tile_n, tile_k = PRODUCT_TILE
    launch(
        kernels.product_kernel,
        min(PROGRAMS, programs_of(n, m, tile_n, tile_m)),
        product.device,
        out=as_stored(product),
        left_codes=as_words(left.codes),
        left_scales=left.scales.contiguous().view(torch.uint8),
        left_exponents=left.exponents,
        right_codes=as_words(right.codes),
        right_scales=right.scales.contiguous().view(torch.uint8),
        right_exponents=right.exponents,
        counts=counts,
        m=m,
        n=n,
        k=k,
        LEFT_SHIFT=SHIFT[left.dtype],
        LEFT_REACH=DEPTH[left.dtype],
        RIGHT_SHIFT=SHIFT[right.dtype],
        RIGHT_REACH=DEPTH[right.dtype],
        LEFT_TRANSPOSED=left.transpose,
        RIGHT_TRANSPOSED=right.transpose,
        IS_WIDE=is_interpreted(),  # the interpreter has no product of bf16 tiles
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
    )
