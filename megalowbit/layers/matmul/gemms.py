"""Matrix products of low-precision operands in bf16, fp16, fp32 or fp64.

A quantised operand enters a GEMM as element × block scale, × tensor scale if that is a power of two. bf16
holds that number exactly; formats with fp32 block scales need fp32. Other tensor scales (`operand_scale`, of
NVFP4 with the option `fp32_scale` and of formats with one scale) cost another pass: their product multiplies
the result, in fp32 (fp64 in an fp64 layer). Without them, the GEMM writes the output itself. An operand whose
`exact_dtype` is fp16 has the range of the tensor it was made from and is rounded to the GEMM's dtype.

The layer's compute dtype decides what runs:

    compute dtype   device   operands                       sums   GEMM result
    bf16            CUDA     bf16 (fp32 if needed)          fp32   bf16, bias applied to the sums; with an
                                                                   operand scale, or an fp32 output: fp32
                    CPU      bf16 (fp32 if needed)          fp32   bf16, scale and bias applied to the sums
                             fp32, where that is faster     fp32   fp32 (see `cpu_gemm`)
    fp16, fp32      CUDA     bf16; fp16 or fp32, see below  fp32   fp32
                    CPU      fp32                           fp32   fp32
    fp64            any      fp64                           fp64   fp64

The result is then scaled, the bias is added, and it is rounded once to the output's dtype. Exceptions and
limits:

- On CUDA, a GEMM that writes bf16 may split its sum and add the parts in bf16, as in `nn.Linear`;
  `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False` prevents that. The GEMM also
  writes an fp16 output of fp16 operands; there it is `allow_fp16_reduced_precision_reduction`.
- bf16 operands on a CPU: the product is rounded to bf16 before the bias if the output is fp32 (autocast) or
  the bias is fp32.
- fp16 and fp32: NVFP4 operands reach 2688, so a product could overflow fp16. Therefore it is formed in fp32.
- fp16 and fp32 on CUDA: operands with their tensor's own range stay fp16 in an fp16 layer, also if the other
  operand is not quantised. In an fp32 layer they are fp32.
- An operand that is not quantised enters in the GEMM's dtype with scale 1. In an fp16 or fp32 layer on CUDA
  this is fp32, except in the case of the previous item.
- MXFP4 with scales rounded up turns numbers from 3.5 · 2¹²⁶ (close to fp32's largest) into 2¹²⁸, which is
  infinite, and infinity times a zero weight is NaN. This stays: a clamped operand would be a wrong number,
  but training detects a non-finite gradient and skips the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.layers.cpu_gemm import DTYPES, cpu_gemm
from megalowbit.quantize import backends
from megalowbit.quantize.cpu import fp4 as kernels_cpu
from megalowbit.quantize.quantized_tensor import Operand, QuantizedTensor

PIECE_ELEMENTS = 1 << 18
MOST_OCTAVES = 60  # of a power of two that a GEMM may apply to an operand: none leaves fp32's range by it


def multiply(
    left: Operand,
    right: Operand,
    *,
    transpose_left: bool = False,
    transpose_right: bool = False,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Multiply two operands: left · right + bias.

    Args:
        left: its matrix is (m, k), or (k, m) with `transpose_left`.
        right: its matrix is (k, n), or (n, k) with `transpose_right`.
        transpose_left: multiply by leftᵀ.
        transpose_right: multiply by rightᵀ.
        compute_dtype: the layer's dtype; decides the GEMM, see the module docstring.
        out_dtype: dtype of the result. Numbers too large for it become infinite.
        bias: (n,), added in fp32 (fp64).
        total: (m, n) in `out_dtype`, in place of a bias: the GEMM adds to it, and it is returned; only if
            `can_start_from`.

    Returns:
        (m, n) in `out_dtype`, contiguous.
    """
    # Decoding codes writes the transpose row-major. An operand that is already decoded (or was never
    # quantised) is transposed as a view: weight (N, K) with strides (K, 1) becomes weightᵀ (K, N) with
    # strides (1, K). BLAS accepts both orders, so nothing is copied.
    dtype = gemm_dtype([left.exact_dtype, right.exact_dtype], compute_dtype, _device(left))
    a, b = _matrices(left, right, transpose_left, transpose_right, compute_dtype, dtype)
    scale = _combined_scale(left, right)
    with no_autocast(a.device.type):
        if total is not None:
            return total.addmm_(a, b)
        if scale is None and _is_last(a, bias, out_dtype):
            return _last_product(a, b, bias)
        alpha = _alpha(a, b, scale, bias)
        if alpha is not None:
            return _scaled_product(a, b, alpha, bias, out_dtype)
        return finish(_product(a, b), scale, bias, out_dtype)


def can_start_from(left: Operand, right: Operand, compute_dtype: torch.dtype, out_dtype: torch.dtype) -> bool:
    """Whether the GEMM of `multiply` may add to a matrix in `out_dtype`: on a GPU, if nothing follows it."""
    device = _device(left)
    dtype = gemm_dtype([left.exact_dtype, right.exact_dtype], compute_dtype, device)
    return device.type == "cuda" and dtype == out_dtype and _combined_scale(left, right) is None


def add_product(
    total: Tensor,
    left: Operand,
    right: Operand,
    *,
    transpose_left: bool = False,
    transpose_right: bool = False,
    compute_dtype: torch.dtype,
    factor: float,
) -> bool:
    """Add factor · left · right to `total` (m, n), fp32, without rounding the product to half precision.

    The GEMM adds (beta = 1). It could apply a tensor scale only with a further rounding, and not at all if
    the scale is on a GPU. Therefore one further pass adds the fp32 product times a scale, except on a CPU if
    the scale is a power of two. The arguments are otherwise those of `multiply`.

    Returns:
        Whether it was added. False, and nothing is changed, where GEMMs have half-precision results (bf16 on
        a CPU) and for fp64.
    """
    device = total.device
    dtype = gemm_dtype([left.exact_dtype, right.exact_dtype], compute_dtype, device)
    if not can_add(dtype, device):
        return False
    scale = _combined_scale(left, right)
    if scale is not None and device.type == "cpu":
        factor *= scale.item()
        scale = None
    a, b = _matrices(left, right, transpose_left, transpose_right, compute_dtype, dtype)
    with no_autocast(device.type):
        if scale is not None:
            total.addcmul_(_product(a, b), scale, value=factor)
        elif _is_power_of_two(factor):
            add_matrix_product(total, a, b, factor)
        else:
            total.add_(_product(a, b), alpha=factor)
    return True


def _is_power_of_two(factor: float) -> bool:
    """Whether a GEMM may multiply an operand by this factor, which is then exact."""
    mantissa, exponent = math.frexp(factor)
    return mantissa == 0.5 and abs(exponent) <= MOST_OCTAVES


def can_add(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a GEMM of operands of this dtype can add to an fp32 matrix."""
    return dtype == torch.float32 or (dtype != torch.float64 and _has_wide_output(device))


def add_matrix_product(total: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """Add factor · a · b to `total` (m, n), fp32, with operands that `can_add`."""
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, alpha=factor, out=total)  # `FlopCounterMode` does not know `addmm_`
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, alpha=factor, out=total)


def _is_last(a: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether the GEMM can write the output, bias included: nothing would be rounded twice."""
    return out_dtype == a.dtype and (bias is None or torch.promote_types(bias.dtype, a.dtype) == a.dtype)


def _last_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias.to(a.dtype), a, b)


def _alpha(a: Tensor, b: Tensor, scale: Tensor | None, bias: Tensor | None) -> float | None:
    """The scale as a float that a CPU's bf16 GEMM can apply to its sums; `None` if it cannot."""
    if a.device.type != "cpu" or a.dtype != torch.bfloat16 or not backends.is_plain(a, b, scale, bias):
        return None  # an fp32 GEMM may apply alpha to an operand, depending on strides
    alpha = 1.0 if scale is None else scale.item()
    return alpha if math.isfinite(alpha) and alpha != 0 else None  # with alpha = 0, BLAS drops NaN operands


def _scaled_product(
    a: Tensor, b: Tensor, alpha: float, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    # A wider output or bias (fp32) needs its bias added by `finish`, after the product was rounded to bf16.
    is_last = torch.promote_types(out_dtype, a.dtype) == a.dtype
    if bias is None or not is_last or torch.promote_types(bias.dtype, a.dtype) != a.dtype:
        product = torch.addmm(a.new_empty(()), a, b, beta=0, alpha=alpha)
        return finish(product, None, bias, out_dtype)
    return torch.addmm(bias.to(a.dtype), a, b, alpha=alpha).to(out_dtype)


def finish(product: Tensor, scale: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Compute product · scale + bias in fp32 (fp64), rounded once; overwrites the product if possible.

    `product` is (m, n), `scale` 0-dim (`None` is 1), `bias` (n,) or `None`.
    """
    if scale is None and bias is None:
        return product.to(out_dtype)
    if _has_c_kernel(product, out_dtype) and backends.is_plain(scale, bias):
        out = product if product.dtype == out_dtype else torch.empty_like(product, dtype=out_dtype)
        return kernels_cpu.scale_and_bias(product, 1.0 if scale is None else scale.item(), bias, out)
    if product.dtype == torch.bfloat16 and out_dtype == torch.bfloat16 and bias is None:
        # On a CPU, multiplying a bf16 matrix by a 0-dim fp32 factor keeps the factor in fp32. A test on
        # exact rounding covers this.
        assert scale is not None  # the case without scale and bias has returned above
        return product.mul_(scale)
    result = product if product.dtype == out_dtype else torch.empty_like(product, dtype=out_dtype)
    for out, rows in _in_rows(result, product):
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        wide = wide if scale is None else wide.mul_(scale)
        wide = wide if bias is None else wide.add_(bias)
        out.copy_(wide)  # does nothing if both are the same memory
    return result


def column_sums(matrix: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Sum over the rows of (m, n), accumulated in fp32 (fp64 for fp64)."""
    if matrix.numel() and _has_c_kernel(matrix, torch.float32):
        return kernels_cpu.column_sums(matrix).to(out_dtype)
    wide = torch.promote_types(matrix.dtype, torch.float32)
    if matrix.device.type == "cuda":
        return matrix.sum(0, dtype=wide).to(out_dtype)  # without a wide copy
    total = torch.zeros(matrix.shape[1], dtype=wide, device=matrix.device)
    for (rows,) in _in_rows(matrix):
        total += rows.sum(0, dtype=wide)
    return total.to(out_dtype)


def _has_c_kernel(matrix: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the C kernel can finish this matrix; it supports fp32, bf16 and fp16."""
    is_known = torch.float64 not in (matrix.dtype, out_dtype) and matrix.numel() > 0
    return is_known and backends.backend_of(matrix) == "c"


def _in_rows(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a few rows at a time on a CPU, where an fp32 copy of all could cost as much as the GEMM."""
    rows, cols = matrices[0].shape
    size = max(1, PIECE_ELEMENTS // max(1, cols))
    if matrices[0].device.type != "cpu" or rows <= size or isinstance(matrices[0], FakeTensor):
        yield matrices
        return
    yield from zip(*(each.split(size) for each in matrices), strict=True)


def gemm_dtype(
    exact: Sequence[torch.dtype | None], compute_dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype of both operands, from their `exact_dtype`s (`None`: not quantised)."""
    if compute_dtype == torch.float64 or torch.float32 in exact:
        return torch.promote_types(compute_dtype, torch.float32)
    if compute_dtype == torch.bfloat16:
        return DTYPES[cpu_gemm()] if device.type == "cpu" else compute_dtype
    if not _has_wide_output(device):
        return torch.float32
    if torch.float16 in exact and (compute_dtype == torch.float32 or torch.bfloat16 not in exact):
        return compute_dtype
    return torch.bfloat16 if None not in exact else torch.float32


def _matrices(
    left: Operand,
    right: Operand,
    transpose_left: bool,
    transpose_right: bool,
    compute_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Both operands in the GEMM's dtype; if fp32 stands for bf16 on a CPU, with the numbers of bf16."""
    a = left.operand(dtype, transpose=transpose_left)
    b = right.operand(dtype, transpose=transpose_right)
    if compute_dtype != torch.bfloat16 or dtype != torch.float32:
        return a, b
    if torch.float32 in (left.exact_dtype, right.exact_dtype):  # bf16 would lose digits
        return a, b
    return rounded_to_bf16(a, left), rounded_to_bf16(b, right)


def rounded_to_bf16(matrix: Tensor, operand: Operand) -> Tensor:
    """The wider matrix of an operand, with numbers of bf16: rounded if it may have more digits."""
    is_bf16 = operand.exact_dtype == torch.bfloat16
    if operand.exact_dtype is None:  # not quantised
        is_bf16 = operand.operand().dtype == torch.bfloat16
    return matrix if is_bf16 else matrix.to(torch.bfloat16).to(matrix.dtype)


def _device(operand: Operand) -> torch.device:
    return operand.codes.device if isinstance(operand, QuantizedTensor) else operand.operand().device


def _has_wide_output(device: torch.device) -> bool:
    """Whether `torch.mm` on this device multiplies half-precision matrices into an fp32 one."""
    return device.type == "cuda" and torch.version.hip is None


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in (torch.bfloat16, torch.float16) and _has_wide_output(a.device):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


def _combined_scale(left: Operand, right: Operand) -> Tensor | None:
    if left.operand_scale is None or right.operand_scale is None:
        return left.operand_scale if right.operand_scale is None else right.operand_scale
    return left.operand_scale * right.operand_scale


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Disable autocast around a product if it is enabled."""
    if autocast_dtype(device_type) is not None:
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Autocast's precision on a device; `None` if autocast is off, as always for meta tensors."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # torch rejects "meta" there
        return torch.get_autocast_dtype(device_type)
    return None
