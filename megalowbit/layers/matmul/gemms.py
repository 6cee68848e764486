"""Matrix products of low-precision operands.

Operands carry codes × block scale, which bf16 holds exactly (fp32, whatever the layer computes in, for fp32
scales of blocks); tensor scales multiply the product, in fp32. Operands whose `exact_dtype` is fp16 have the
range of the tensor itself and are rounded to what the GEMM takes. The layer's compute dtype decides the GEMM:

- bf16: bf16 operands, fp32 accumulation. The result is rounded once, after scale and bias: on CUDA the
  product comes out in fp32, a CPU GEMM applies both to its sums. Where the output is to be fp32 while a CPU
  multiplies in bf16 (autocast), and where a bias is fp32, the product is rounded to bf16 before.
- fp16, fp32: operands reach 2688, so a product overflows fp16; it is formed in fp32 (fp32 operands on a
  CPU; bf16 operands with fp32 output on CUDA), scaled, then cast. On CUDA operands with their tensor's own
  range stay fp16 in an fp16 layer, beside one that is not quantised too; in an fp32 layer they are fp32.
- fp64: fp64 throughout. An operand that is not quantised enters in the GEMM's dtype with scale 1.

One operand is beyond all of these: MXFP4 with scales rounded up takes numbers from 3.5 · 2¹²⁶ on, next to
fp32's largest, to 2¹²⁸, which is infinite, and times a weight of zero NaN. It stays so: a clamped operand
would be a wrong number, and a non-finite gradient is one that training sees and skips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.quantize import backends
from megalowbit.quantize.cpu import fp4 as kernels_cpu
from megalowbit.quantize.quantized_tensor import Operand, QuantizedTensor

PIECE_ELEMENTS = 1 << 18


def multiply(
    left: Operand,
    right: Operand,
    *,
    transpose_left: bool = False,
    transpose_right: bool = False,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply two operands: left · right + bias.

    Args:
        left: (m, k), or (k, m) with `transpose_left`.
        right: (k, n), or (n, k) with `transpose_right`.
        transpose_left: multiply by leftᵀ.
        transpose_right: multiply by rightᵀ.
        compute_dtype: of the layer; decides the GEMM, see above.
        out_dtype: of the result. What does not fit becomes infinite.
        bias: (n,), added in fp32 (fp64).

    Returns:
        (m, n) in `out_dtype`.
    """
    dtype = gemm_dtype([left.exact_dtype, right.exact_dtype], compute_dtype, _device(left))
    a = left.operand(dtype, transpose=transpose_left)
    b = right.operand(dtype, transpose=transpose_right)
    scale = _combined_scale(left, right)
    with no_autocast(a.device.type):
        alpha = _alpha(a, b, scale, bias)
        if alpha is not None:
            return _scaled_product(a, b, alpha, bias, out_dtype)
        return finish(_product(a, b), scale, bias, out_dtype)


def _alpha(a: Tensor, b: Tensor, scale: Tensor | None, bias: Tensor | None) -> float | None:
    """The scale as a number that a CPU's bf16 GEMM can apply to its sums; `None` where it cannot."""
    if a.device.type != "cpu" or a.dtype != torch.bfloat16 or not backends.is_plain(a, b, scale, bias):
        return None  # an fp32 GEMM may apply it to an operand, depending on strides
    alpha = 1.0 if scale is None else scale.item()
    return alpha if math.isfinite(alpha) and alpha != 0 else None  # BLAS drops NaN operands where it is 0


def _scaled_product(
    a: Tensor, b: Tensor, alpha: float, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    is_last = torch.promote_types(out_dtype, a.dtype) == a.dtype  # what is wider gets its bias in there
    if bias is None or not is_last or torch.promote_types(bias.dtype, a.dtype) != a.dtype:
        product = torch.addmm(a.new_empty(()), a, b, beta=0, alpha=alpha)
        return finish(product, None, bias, out_dtype)
    return torch.addmm(bias.to(a.dtype), a, b, alpha=alpha).to(out_dtype)


def finish(product: Tensor, scale: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Compute product · scale + bias in fp32 (fp64), rounded once; overwrites the product if it can.

    `product` is (m, n), `scale` 0-dim (`None`: 1), `bias` (n,) or `None`.
    """
    if scale is None and bias is None:
        return product.to(out_dtype)
    if _has_c_kernel(product, out_dtype) and backends.is_plain(scale, bias):
        out = product if product.dtype == out_dtype else torch.empty_like(product, dtype=out_dtype)
        return kernels_cpu.scale_and_bias(product, 1.0 if scale is None else scale.item(), bias, out)
    if product.dtype == torch.bfloat16 and out_dtype == torch.bfloat16 and bias is None:
        # A 0-dim factor keeps its fp32 value in a bf16 product on a CPU; the test of exact rounding
        # holds it.
        assert scale is not None  # handled above
        return product.mul_(scale)
    result = product if product.dtype == out_dtype else torch.empty_like(product, dtype=out_dtype)
    for out, rows in _in_rows(result, product):
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        wide = wide if scale is None else wide.mul_(scale)
        wide = wide if bias is None else wide.add_(bias)
        out.copy_(wide)  # nothing is moved where both are the same memory
    return result


def column_sums(matrix: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Sum over the rows of (m, n), accumulated in fp32 (fp64 for fp64)."""
    if matrix.numel() and _has_c_kernel(matrix, torch.float32):
        return kernels_cpu.column_sums(matrix).to(out_dtype)
    wide = torch.promote_types(matrix.dtype, torch.float32)
    total = torch.zeros(matrix.shape[1], dtype=wide, device=matrix.device)
    for (rows,) in _in_rows(matrix):
        total += rows.to(wide).sum(0)
    return total.to(out_dtype)


def _has_c_kernel(matrix: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the C kernel finishes this matrix; it knows fp32, bf16 and fp16."""
    is_known = torch.float64 not in (matrix.dtype, out_dtype) and matrix.numel() > 0
    return is_known and backends.backend_of(matrix) == "c"


def _in_rows(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rows at a time on a CPU, where an fp32 copy of all can cost as much as the GEMM; else all."""
    rows, cols = matrices[0].shape
    size = max(1, PIECE_ELEMENTS // max(1, cols))
    if matrices[0].device.type != "cpu" or rows <= size or isinstance(matrices[0], FakeTensor):
        yield matrices
        return
    yield from zip(*(each.split(size) for each in matrices), strict=True)


def gemm_dtype(
    exact: Sequence[torch.dtype | None], compute_dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype of both operands, whose `exact_dtype`s (`None`: not quantised) are `exact`."""
    if compute_dtype == torch.float64 or torch.float32 in exact:
        return torch.promote_types(compute_dtype, torch.float32)
    if compute_dtype == torch.bfloat16:
        return compute_dtype
    if not _has_wide_output(device):
        return torch.float32
    if torch.float16 in exact and (compute_dtype == torch.float32 or torch.bfloat16 not in exact):
        return compute_dtype
    return torch.bfloat16 if None not in exact else torch.float32


def _device(operand: Operand) -> torch.device:
    return operand.codes.device if isinstance(operand, QuantizedTensor) else operand.operand().device


def _has_wide_output(device: torch.device) -> bool:
    """Whether `torch.mm` multiplies matrices of half precision into an fp32 one there."""
    return device.type == "cuda" and torch.version.hip is None


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in (torch.bfloat16, torch.float16) and _has_wide_output(a.device):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


def _combined_scale(left: Operand, right: Operand) -> Tensor | None:
    if left.tensor_scale is None or right.tensor_scale is None:
        return left.tensor_scale if right.tensor_scale is None else right.tensor_scale
    return left.tensor_scale * right.tensor_scale


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Keep autocast, where it is on, away from a product."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
