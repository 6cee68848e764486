"""The factors of a weight W = W_R + U·diag(S)·V where it is multiplied, and their gradients.

Only W_R is quantised. U, S and V hold the strong directions, so a rounding error of theirs would be that of
the whole weight; they stay in the compute dtype and enter as the low-rank part of a split operand does, in
thin products. With Q(x) the quantised input, and M = Q(dY)ᵀ·Q(x) what W_R gets as its gradient, the output is

    y = Q(x)·Q(W_R)ᵀ + (Q(x)·Vᵀ)·(U·S)ᵀ

and the gradients of the factors follow from M by the chain rule: nothing more has to be kept for backward
than for a plain weight, and two products of size out × in × k replace some over all tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit.layers.matmul.gemms import gemm_dtype, no_autocast
from megalowbit.layers.matmul.operand import LowRankPart, MatmulOperand
from megalowbit.quantize.quantized_tensor import UnquantizedTensor


class WeightFactors(NamedTuple):
    """The low-rank part of a weight (out, in).

    Attributes:
        u: (out, k).
        s: (k,).
        v: (k, in).
    """

    u: Tensor
    s: Tensor
    v: Tensor

    def beside(self, residual: MatmulOperand) -> MatmulOperand:
        """The weight as it is multiplied: Q(W_R), which a cache may keep for longer, and these factors."""
        values = self.s.detach().to(torch.promote_types(self.s.dtype, torch.float32))
        left, right = self.u.detach().t(), self.v.detach()
        low_rank = LowRankPart(UnquantizedTensor(values=left), values, UnquantizedTensor(values=right))
        return replace(residual, low_rank=low_rank)

    def gradients(self, grad_weight: Tensor, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of U, S and V: M·Vᵀ·S, diag(Uᵀ·M·Vᵀ), S·Uᵀ·M, each in its factor's dtype.

        `grad_weight` is M (out, in), of the whole weight; S is multiplied, and sums are formed, in fp32
        (fp64) at least.
        """
        dtype = gemm_dtype([None, None], compute_dtype, grad_weight.device)
        wide = torch.promote_types(dtype, torch.float32)
        with no_autocast(grad_weight.device.type):
            matrix, s = grad_weight.to(dtype), self.s.detach().to(wide)
            u, v = self.u.detach().to(dtype), self.v.detach().to(dtype)
            along_v = (matrix @ v.t()).to(wide)  # (out, k)
            along_u = (u.t() @ matrix).to(wide)  # (k, in)
            of_s = (u * along_v).sum(0)
            return (
                (along_v * s).to(self.u.dtype),
                of_s.to(self.s.dtype),
                (along_u * s.unsqueeze(1)).to(self.v.dtype),
            )

    def squared_norm(self, residual: Tensor, squared_norm: Tensor) -> Tensor:
        """‖W_R + U·diag(S)·V‖², 0-dim fp64, without forming the sum.

        `residual` is W_R (out, in) and `squared_norm` ‖W_R‖², 0-dim fp64.
        """
        wide = torch.promote_types(residual.dtype, torch.float32)
        with no_autocast(residual.device.type):
            left = (self.u.detach().to(wide) * self.s.detach().to(wide)).to(residual.dtype)
            right = self.v.detach().to(residual.dtype)
            across = (left * (residual @ right.t())).sum(dtype=torch.float64)
            own = ((left.t() @ left) * (right @ right.t())).sum(dtype=torch.float64)
        return squared_norm + 2 * across + own
