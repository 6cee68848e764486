"""Launches the kernel that quantises factors, `triton.factor_codes`; imports Triton at the first launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.quantize.encoding import EncodeRequest, new_encoded
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantized_tensor import QuantizedTensor
from megalowbit.quantize.quantizer import BlockQuantizer, Quantizer
from megalowbit.quantize.triton.launch_arguments import as_stored, launch, programs_of
from megalowbit.spectral.triton.launch_factors import Maxima

TILE = (16, 16)  # directions, and groups of 16 numbers
COVERED = "nvfp4e2m1bnosr"  # the default of splits


class QuantizedFactors(NamedTuple):
    """Uᵀ (k, rows) and Vᵀ (k, cols) quantised, and U·diag(values) (rows, k) and Vᵀ for products."""

    left: QuantizedTensor
    right: QuantizedTensor
    tall: Tensor
    flat: Tensor


def covers(chosen: Quantizer) -> bool:
    """Whether the kernel quantises as this quantizer does."""
    default = quantizer(COVERED)
    assert isinstance(default, BlockQuantizer)
    return isinstance(chosen, BlockQuantizer) and chosen.encoding == default.encoding


def quantized(
    chosen: Quantizer, left: Tensor, right: Tensor, values: Tensor, maxima: Maxima
) -> QuantizedFactors:
    """Quantise both factors; the same bits as the quantizer and `split.scaled_left`; requires `covers`.

    Args:
        chosen: the quantizer.
        left: Uᵀ (k, rows), bf16, contiguous; as `right`, from `launch_factors.ordered`.
        right: Vᵀ (k, cols).
        values: (k,) fp32.
        maxima: theirs.
    """
    from megalowbit.spectral.triton.factor_codes import encode_kernel

    assert isinstance(chosen, BlockQuantizer)  # by `covers`
    (k, rows), cols, device = left.shape, right.shape[1], left.device
    tall, flat = torch.empty(rows, k, dtype=left.dtype, device=device), torch.empty_like(right)
    of_left, of_right = (new_encoded(EncodeRequest(each, chosen.encoding)) for each in (left, right))
    launch(
        encode_kernel,
        sum(programs_of(-(-size // 16), k, TILE[1], TILE[0]) for size in (rows, cols)),
        device,
        left=as_stored(left),
        right=as_stored(right),
        left_amax=maxima.left,
        right_amax=maxima.right,
        values=values,
        left_codes=of_left.codes.view(torch.int32),
        left_scales=as_stored(of_left.scales),
        left_scale=of_left.tensor_scale,
        right_codes=of_right.codes.view(torch.int32),
        right_scales=as_stored(of_right.scales),
        right_scale=of_right.tensor_scale,
        tall=as_stored(tall),
        flat=as_stored(flat),
        k=k,
        rows=rows,
        cols=cols,
        TILE_ROWS=TILE[0],
        TILE_GROUPS=TILE[1],
    )
    return QuantizedFactors(
        chosen.tensor_of(of_left, left.shape, left.dtype),
        chosen.tensor_of(of_right._replace(operand=flat), right.shape, right.dtype),
        tall,
        flat,
    )
