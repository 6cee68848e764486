"""A product of operands of which at least one is split: the residuals' GEMM and three thin ones.

    (g·R + A·B) · (h·T + C·D) = g·h·R·T + A·(B·(h·T + C·D)) + (g·R·C)·D

The first term runs in whatever the recipe asks for, quantised, as any product. The others have an inner or
outer size of k, the rank, and run in the layer's dtype on the quantised factors; B·(…) and R·C are rounded
to it once. So neither operand is ever put together again: what backward keeps are codes, and FP4 hardware
could do the same.

A mean row (A is a column of ones) costs no pass over the result: A·(B·…) is one row, added as the bias is.

Where a Hadamard transform H was applied along the axis summed over, R and T hold R·Hᵀ and H·T; B and C are
transformed likewise where they meet them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.layers.matmul.gemms import gemm_dtype, no_autocast
from megalowbit.layers.matmul.operand import LowRankPart, MatmulOperand
from megalowbit.quantize.hadamard import GROUP, hadamard


class Side(NamedTuple):
    """One operand of a product, as it enters it.

    Attributes:
        operand: residual and low-rank part.
        transpose: whether the product takes the transpose of the tensor the operand stands for.
    """

    operand: MatmulOperand
    transpose: bool

    @property
    def low_rank(self) -> LowRankPart | None:
        """The low-rank part, if there is one."""
        return self.operand.low_rank

    @property
    def is_row(self) -> bool:
        """Whether the low-rank part adds the same row everywhere."""
        return self.low_rank is not None and self.low_rank.is_row and not self.transpose

    def residual(self, dtype: torch.dtype) -> Tensor:
        """The residual's codes × block scales as a matrix, without the tensor's scale."""
        return self.operand.tensor.operand(dtype, transpose=self.transpose != self.operand.is_transposed)

    def scaled(self, thin: Tensor, dtype: torch.dtype) -> Tensor:
        """A product with `residual`, times the tensor's scale and the residual's gain."""
        scale = self.operand.tensor.tensor_scale
        gain = None if self.low_rank is None else self.low_rank.gain
        for factor in (scale, gain):
            if factor is not None:
                thin = thin.to(torch.promote_types(thin.dtype, torch.float32)).mul_(factor)
        return thin.to(dtype)


def multiply_split(
    main: Callable[[torch.dtype, Tensor | None], Tensor],
    left: Side,
    right: Side,
    *,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    signs: int | None,
) -> Tensor:
    """Multiply left · right + bias, where one is split; dtypes and `bias` are as of `gemms.multiply`.

    `main` takes (out_dtype, bias) and returns the product of the residuals; `signs` are those of the Hadamard
    transform along the axis summed over, `None` where there was none.

    Returns:
        (m, n) in `out_dtype`.
    """
    device = left.operand.device
    dtype = gemm_dtype([None, None], compute_dtype, device)
    gains = [side.low_rank.gain for side in (left, right) if side.low_rank is not None]
    scaled = [gain for gain in gains if gain is not None]
    with no_autocast(device.type):
        terms = _thin_terms(left, right, dtype, signs)
        rows = [wide for tall, wide in terms if tall is None]
        if rows:
            row = rows[0].flatten().to(torch.promote_types(dtype, torch.float32))
            bias = (row if bias is None else row + bias).to(dtype)
        # What is rounded to fp16 only in the end may be wider than fp16 in between.
        out = main(torch.promote_types(out_dtype, dtype), None if scaled else bias)
        for gain in scaled:
            out.mul_(gain)
        if scaled and bias is not None:
            out.add_(bias)
        for tall, wide in terms:
            if tall is None:
                continue
            if out.dtype == dtype:
                out.addmm_(tall, wide)
            else:
                out.add_(tall @ wide)
    return out.to(out_dtype)


def _thin_terms(
    left: Side, right: Side, dtype: torch.dtype, signs: int | None
) -> list[tuple[Tensor | None, Tensor]]:
    """Pairs (m, k) and (k, n) whose products are to be added; `None` is a column of ones."""
    terms: list[tuple[Tensor | None, Tensor]] = []
    a_b = None if left.low_rank is None else left.low_rank.matrices(dtype, transpose=left.transpose)
    c_d = None if right.low_rank is None else right.low_rank.matrices(dtype, transpose=right.transpose)
    if a_b is not None:
        a, b = a_b
        wide = right.scaled(_transformed(b, signs) @ right.residual(dtype), dtype)
        if c_d is not None:
            wide = wide.addmm_(b @ c_d[0], c_d[1])
        terms.append((None if left.is_row else a, wide))
    if c_d is not None:
        c, d = c_d
        tall = left.scaled(left.residual(dtype) @ _transformed(c.t(), signs).t(), dtype)
        terms.append((tall, d))
    return terms


def _transformed(matrix: Tensor, signs: int | None) -> Tensor:
    """(k, inner) after the Hadamard transform along its rows, padded to whole groups as residuals are."""
    if signs is None:
        return matrix
    padded = torch.nn.functional.pad(matrix.float(), (0, -matrix.shape[1] % GROUP))
    return hadamard(padded, signs).to(matrix.dtype)
