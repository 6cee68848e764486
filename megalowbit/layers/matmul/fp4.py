"""Products on FP4 tensor cores (Blackwell), which read NVFP4 and MXFP4 operands as they are stored.

Off by default; set `gemm="fp4"` in a recipe. The hardware needs

- both operands in blocks along the axis summed over, which is the layout "per_gemm". Each is stored row-major
  with that axis last and contiguous: left (m, k), right (n, k). `scaled_mm` takes the right one as (k, n)
  column-major, so `native_product` passes its transposed view.
- block scales in tiles of 128 rows by 4 blocks, each tile in the order that PyTorch calls SWIZZLE_32_4_4.
- k in whole steps of 32 elements; operands are padded with zeros.
- n, the number of columns of the result, as a multiple of 16. Other products run in bf16, which gives the
  same numbers up to the order of summation. The layer counts them, and the log names each size once.

    product        left (m, k)              right (n, k)
    output         input (M, K)             weight (N, K)
    grad_input     grad_output (M, N)       weightᵀ (K, N)
    grad_weight    grad_outputᵀ (N, M)      inputᵀ (K, M)

Not tested on hardware. A test compares the arrangement of scales with an index-by-index reference, and
`torch.nn.functional.scaled_mm` on meta tensors checks arguments and shapes as far as it can. No test checks
numbers.
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
BYTES_MULTIPLE = 16  # bytes of a packed row, that is 32 elements
SIZE_MULTIPLE = 16  # columns of the result
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
        scales: (rows, blocks), one byte each.

    Returns:
        1-D, same dtype. Tiles of 128 × 4 follow each other row by row. Within a tile, row r and block b are
        at offset 16·(r mod 32) + 4·(r div 32) + b.
    """
    rows, blocks = scales.shape
    codes = pad(scales.view(torch.uint8), (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    # (rows, blocks) → (row tiles, 4, 32, block tiles, 4), and with r = 32·i + j the order within a tile is
    # (j, i, b): 16 bytes for each j.
    tiles = codes.unflatten(1, (-1, TILE_BLOCKS)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def hardware_operand(
    tensor: QuantizedTensor,
) -> tuple[Tensor, list[Tensor], list[ScalingType], list[SwizzleType]]:
    """The arguments of `scaled_mm` for one operand (rows, elements summed over), rows first.

    Returns:
        Codes (rows, elements / 2) as `float4_e2m1fn_x2`, two elements a byte; scales; their kinds; their
        orders.
    """
    extra = -tensor.codes.shape[1] % BYTES_MULTIPLE
    codes, scales = tensor.codes, tensor.scales
    if extra:
        codes = pad(codes, (0, extra))
        # new number of blocks = padded bytes / bytes of a block
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
    """Multiply left · rightᵀ + bias on FP4 tensor cores; `None` if operands or sizes do not fit.

    `left` is stored as (m, k) and `right` as (n, k), with blocks along k, the axis summed over. `out_dtype`
    and `bias` are those of `gemms.multiply`.

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
        _log_unsupported_size(len(b.codes))
        return None
    with no_autocast(device.type):
        is_final = bias is None and out_dtype in (torch.bfloat16, torch.float16)
        product = native_product(a, b, out_dtype if is_final else torch.float32)
        return finish(product, None, bias, out_dtype)


@functools.lru_cache(maxsize=256)
def _log_unsupported_size(columns: int) -> None:
    """Log once for each size that products with this number of columns run in bf16."""
    logger.info(
        'gemm "fp4": products with %d columns run in bf16, because FP4 tensor cores need a multiple of %d',
        columns,
        SIZE_MULTIPLE,
    )


def native_product(left: QuantizedTensor, right: QuantizedTensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply left · rightᵀ, tensor scales included: stored (m, k) and (n, k) → (m, n) in `out_dtype`."""
    a, scale_a, recipe_a, swizzle_a = hardware_operand(left)
    b, scale_b, recipe_b, swizzle_b = hardware_operand(right)
    return scaled_mm(
        a,
        b.t(),  # (k, n) column-major, as scaled_mm requires
        scale_a,
        recipe_a,
        scale_b,
        recipe_b,
        swizzle_a=swizzle_a,
        swizzle_b=swizzle_b,
        output_dtype=out_dtype,
    )
