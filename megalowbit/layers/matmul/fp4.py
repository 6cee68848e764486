"""Products on FP4 tensor cores (Blackwell), of NVFP4 or MXFP4 operands as they are stored.

Off by default (`gemm="fp4"` in a recipe). The hardware wants both operands in blocks along the axis summed
over, which is the layout "per_gemm", and block scales in tiles of 128 rows by 4 blocks, each tile in the
order that PyTorch calls SWIZZLE_32_4_4. Operands are padded with zeros to whole steps of 32 elements along
that axis. A product whose number of columns is no multiple of 16 runs in bf16, which gives the same up to
the order of summation: the layer counts it, and the log names the size once.

Untested on hardware: the arrangement of scales is held by a test against an index-by-index reference,
arguments and shapes by `torch.nn.functional.scaled_mm` on meta tensors as far as that checks them. Numbers
are not.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from megalowbit.errors import UserError
from megalowbit.layers.matmul.gemms import finish, no_autocast
from megalowbit.layers.matmul.operand import MatmulOperand
from megalowbit.quantize.quantized_tensor import QuantizedTensor

TILE_ROWS, TILE_BLOCKS = 128, 4
CAPABILITY = (10, 0)
BYTES_MULTIPLE = 16  # of a packed row; 32 elements
SIZE_MULTIPLE = 16
logger = logging.getLogger("megalowbit")


def why_unavailable(device: torch.device) -> str | None:
    """Why a device cannot multiply FP4 matrices; `None` if it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "only NVIDIA GPUs from Blackwell on have FP4 tensor cores"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, FP4 needs 10.0 (Blackwell)"
    return None


def swizzled(scales: Tensor) -> Tensor:
    """Block scales in the hardware's order, padded with zeros to whole tiles.

    Args:
        scales: 1-byte numbers (rows, blocks).

    Returns:
        Same dtype, one axis: tiles of 128 × 4 row by row; within a tile, row r and block b stand at
        16·(r mod 32) + 4·(r div 32) + b.
    """
    rows, blocks = scales.shape
    codes = pad(scales.view(torch.uint8), (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    tiles = codes.unflatten(1, (-1, TILE_BLOCKS)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def hardware_operand(
    tensor: QuantizedTensor,
) -> tuple[Tensor, list[Tensor], list[ScalingType], list[SwizzleType]]:
    """What `scaled_mm` takes for one operand (rows, elements summed over), rows first."""
    extra = -tensor.codes.shape[1] % BYTES_MULTIPLE
    codes, scales = tensor.codes, tensor.scales
    if extra:
        codes = pad(codes, (0, extra))
        zeros = codes.shape[1] // (tensor.codes.shape[1] // scales.shape[1]) - scales.shape[1]
        scales = pad(scales.view(torch.uint8), (0, zeros)).view(scales.dtype)
    matrix = codes.view(torch.float4_e2m1fn_x2)
    if tensor.tensor_scale is None:
        return matrix, [swizzled(scales)], [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    return (
        matrix,
        [swizzled(scales), tensor.tensor_scale],
        [ScalingType.BlockWise1x16, ScalingType.TensorWise],
        [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
    )


def multiply(
    left: MatmulOperand,
    right: MatmulOperand,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Multiply left · rightᵀ + bias on FP4 tensor cores; `None` where operands or sizes do not fit.

    `left` is (m, k) and `right` (n, k) as stored: blocks lie along the axis summed over, as in the layout
    "per_gemm". `out_dtype` and `bias` are as of `gemms.multiply`.

    Raises:
        UserError: the device has no FP4 tensor cores.
    """
    a, b = left.tensor, right.tensor
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor):
        return None
    if isinstance(a.codes, FakeTensor):
        return None
    device = a.codes.device
    reason = why_unavailable(device)
    if reason is not None:
        raise UserError(
            f'gemm "fp4" cannot run on {device}: {reason}; set gemm to "bf16" in the recipe, which '
            "computes the same products"
        )
    if a.codes.numel() == 0:
        return None
    if len(b.codes) % SIZE_MULTIPLE:
        _say_unfit(len(b.codes))
        return None
    with no_autocast(device.type):
        is_final = bias is None and out_dtype in (torch.bfloat16, torch.float16)
        product = native_product(a, b, out_dtype if is_final else torch.float32)
        return finish(product, None, bias, out_dtype)


@functools.lru_cache(maxsize=256)
def _say_unfit(columns: int) -> None:
    """Log, once for each size, that products of so many columns run in bf16."""
    logger.info(
        'gemm "fp4": products of %d columns run in bf16, FP4 tensor cores take multiples of %d',
        columns,
        SIZE_MULTIPLE,
    )


def native_product(left: QuantizedTensor, right: QuantizedTensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply left · rightᵀ, tensor scales included: (m, k) and (n, k) → (m, n)."""
    a, scale_a, recipe_a, swizzle_a = hardware_operand(left)
    b, scale_b, recipe_b, swizzle_b = hardware_operand(right)
    return scaled_mm(
        a,
        b.t(),
        scale_a,
        recipe_a,
        scale_b,
        recipe_b,
        swizzle_a=swizzle_a,
        swizzle_b=swizzle_b,
        output_dtype=out_dtype,
    )
