"""Products in which at least one operand is split: the residuals' GEMM and three thin products.

A split operand is gain · residual + low-rank part. With left = g·R + A·B and right = h·T + C·D,

    (g·R + A·B) · (h·T + C·D) = g·h·R·T + A·(B·(h·T + C·D)) + (g·R·C)·D

    R   (m, inner)   residual, quantised          T   (inner, n)   residual, quantised
    A   (m, k)       B  (k, inner)                C   (inner, k)   D  (k, n)

k is the rank of the split and `inner` the axis that the product sums over. The first term is a product of
quantised operands and runs in the precision that the recipe sets. The other terms have an inner or outer
size of k. They run in the GEMM's dtype on the quantised factors, with B·(…) and R·C rounded to it once. No
operand is ever reassembled: backward keeps codes, and FP4 hardware could do the same.

If A is a column of ones (a mean row), A·(B·…) is one row (1, n) and is added like a bias, without another
pass over the result.

If a Hadamard transform H was applied along the axis summed over, R and T are stored as R·Hᵀ and H·T. B and C
are transformed in the same way before they are multiplied by T and R.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.layers.matmul.gemms import (
    add_matrix_product,
    can_add,
    gemm_dtype,
    no_autocast,
    rounded_to_bf16,
)
from megalowbit.layers.matmul.operand import LowRankPart, MatmulOperand
from megalowbit.quantize.hadamard import GROUP, hadamard


class Side(NamedTuple):
    """One operand of a product, with its orientation.

    Attributes:
        operand: residual and low-rank part.
        transpose: whether the product takes the transpose of the original tensor (not of the stored matrix).
    """

    operand: MatmulOperand
    transpose: bool

    @property
    def low_rank(self) -> LowRankPart | None:
        """The low-rank part, or `None`."""
        return self.operand.low_rank

    @property
    def is_row(self) -> bool:
        """Whether the low-rank part adds the same row to every row."""
        return self.low_rank is not None and self.low_rank.is_row and not self.transpose

    def factors(self, compute_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """The factors of the low-rank part in `dtype`, or `None`.

        In a bf16 layer they are rounded to bf16, as for the residual, also if they are multiplied in fp32.
        """
        if self.low_rank is None:
            return None
        rounded = compute_dtype if compute_dtype == torch.bfloat16 else dtype
        left, right = self.low_rank.matrices(rounded, transpose=self.transpose)
        return left.to(dtype), right.to(dtype)

    def residual(self, compute_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
        """The residual's operand as a matrix, without `operand_scale`; in a bf16 layer with numbers of bf16.

        For the left operand (m, inner), for the right one (inner, n).
        """
        tensor = self.operand.tensor
        matrix = tensor.operand(dtype, transpose=self.transpose != self.operand.is_transposed)
        is_wider = compute_dtype == torch.bfloat16 and dtype != compute_dtype
        return rounded_to_bf16(matrix, tensor) if is_wider else matrix

    def scaled(self, thin: Tensor, dtype: torch.dtype) -> Tensor:
        """A product with `residual`, times `operand_scale` and the residual's gain."""
        scale = self.operand.tensor.operand_scale
        gain = None if self.low_rank is None else self.low_rank.gain
        for factor in (scale, gain):
            if factor is not None:
                thin = thin.to(torch.promote_types(thin.dtype, torch.float32)).mul_(factor)
        return thin.to(dtype)


def multiply_split(
    main: Callable[..., Tensor],
    left: Side,
    right: Side,
    *,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    signs: int | None,
    may_start: bool = False,
) -> Tensor:
    """Multiply left · right + bias if at least one is split; dtypes and `bias` are those of `gemms.multiply`.

    `main` takes (out_dtype, bias) and returns the product of the residuals (m, n). `signs` are those of the
    Hadamard transform along the axis summed over, or `None` without a transform. With `may_start`, `main`
    also takes `total`, see `gemms.can_start_from`: then the thin products are written first, and the GEMM
    adds to them, which reads the result once less. Either way each term rounds it once.

    Returns:
        (m, n) in `out_dtype`.
    """
    device = left.operand.device
    dtype = gemm_dtype([None, None], compute_dtype, device)
    gains = [side.low_rank.gain for side in (left, right) if side.low_rank is not None]
    scaled = [gain for gain in gains if gain is not None]
    with no_autocast(device.type):
        terms = _thin_terms(left, right, compute_dtype, signs)
        rows = [wide for tall, wide in terms if tall is None]
        if rows:
            row = rows[0].flatten()
            wide_row = row if bias is None else row.to(torch.promote_types(dtype, torch.float32)) + bias
            bias = wide_row.to(dtype)
        tall_terms = [(tall, wide) for tall, wide in terms if tall is not None]
        is_bias_exact = bias is None or torch.promote_types(bias.dtype, dtype) == dtype
        if may_start and tall_terms and not scaled and out_dtype == dtype and is_bias_exact:
            tall, wide = _joined(tall_terms)
            total = tall @ wide if bias is None else torch.addmm(bias.to(dtype), tall, wide)
            return main(out_dtype, None, total)
        # Stay in the wider dtype until the end: an intermediate sum may exceed fp16 although the result fits.
        out = main(torch.promote_types(out_dtype, dtype), None if scaled else bias)
        for gain in scaled:
            out.mul_(gain)
        if scaled and bias is not None:
            out.add_(bias)
        for tall, wide in tall_terms:
            if out.dtype == dtype:
                out.addmm_(tall, wide)
            else:
                out.add_(tall @ wide)
    return out.to(out_dtype)


def add_split_product(
    total: Tensor,
    main: Callable[[], bool],
    left: Side,
    right: Side,
    *,
    compute_dtype: torch.dtype,
    signs: int | None,
    factor: float,
) -> bool:
    """Add factor · left · right to `total` (m, n), fp32; `main` adds the residuals' product.

    Returns:
        Whether it was added; see `gemms.add_product`. Products with gains are not.
    """
    if any(side.low_rank is not None and side.low_rank.gain is not None for side in (left, right)):
        return False
    device = left.operand.device
    dtype = gemm_dtype([None, None], compute_dtype, device)
    if left.is_row or not can_add(dtype, device) or not main():
        return False
    with no_autocast(device.type):
        terms = _thin_terms(left, right, compute_dtype, signs)
        # only a left operand that is a row has no tall matrix
        tall, wide = _joined([(tall, wide) for tall, wide in terms if tall is not None])
        add_matrix_product(total, tall, wide, factor)
    return True


def _thin_terms(
    left: Side, right: Side, compute_dtype: torch.dtype, signs: int | None
) -> list[tuple[Tensor | None, Tensor]]:
    """Pairs (m, k) and (k, n) whose products are added to the result; `None` stands for a column of ones."""
    terms: list[tuple[Tensor | None, Tensor]] = []
    dtype = gemm_dtype([None, None], compute_dtype, left.operand.device)
    # a (m, k), b (k, inner), c (inner, k), d (k, n)
    a_b, c_d = left.factors(compute_dtype, dtype), right.factors(compute_dtype, dtype)
    if a_b is not None:
        a, b = a_b
        wide = right.scaled(_transformed(b, signs) @ right.residual(compute_dtype, dtype), dtype)  # (k, n)
        if c_d is not None:
            wide = wide.addmm_(b @ c_d[0], c_d[1])
        terms.append((None if left.is_row else a, wide))
    if c_d is not None:
        c, d = c_d
        # c.t() is (k, inner), the shape in which the transform runs along the last axis; tall is (m, k)
        tall = left.scaled(left.residual(compute_dtype, dtype) @ _transformed(c.t(), signs).t(), dtype)
        terms.append((tall, d))
    return terms


def _joined(terms: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One pair (m, 2·k) and (2·k, n) whose product is the sum of the terms: (m, n) is written once."""
    if len(terms) == 1:
        return terms[0]
    talls, wides = zip(*terms, strict=True)
    return torch.cat(talls, 1), torch.cat(wides)


def _transformed(matrix: Tensor, signs: int | None) -> Tensor:
    """(k, inner) after the Hadamard transform along its rows, padded to whole groups like the residuals."""
    if signs is None:
        return matrix
    padded = torch.nn.functional.pad(matrix.float(), (0, -matrix.shape[1] % GROUP))
    return hadamard(padded, signs).to(matrix.dtype)
