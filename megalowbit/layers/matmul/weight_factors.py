"""The factors of a weight W = W_R + U·diag(S)·V: their products and gradients.

W_R is (N, K), U (N, k), S (k,) and V (k, K), with N output features, K input features and rank k. Only W_R is
quantised. U, S and V hold the strong directions: an error in them would be an error of the whole weight. They
stay in the compute dtype and are multiplied like the low-rank part of a split operand, in thin products. With
the quantised input Q(x) (M, K) and the gradient of W_R, G = Q(dY)ᵀ·Q(x) (N, K), the output is

    y = Q(x)·Q(W_R)ᵀ + (Q(x)·Vᵀ)·(U·S)ᵀ

and the gradients of the factors follow from G by the chain rule. Backward therefore keeps nothing more than
for a plain weight, and two products of size N × K × k replace several over all tokens.
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

    def attach_to(self, residual: MatmulOperand) -> MatmulOperand:
        """The weight as an operand: Q(W_R), which a cache may keep, together with these factors."""
        values = self.s.detach().to(torch.promote_types(self.s.dtype, torch.float32))
        left, right = self.u.detach().t(), self.v.detach()
        low_rank = LowRankPart(UnquantizedTensor(values=left), values, UnquantizedTensor(values=right))
        return replace(residual, low_rank=low_rank)

    def gradients(self, grad_weight: Tensor, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of U, S and V: G·Vᵀ·S, diag(Uᵀ·G·Vᵀ), S·Uᵀ·G, each in its factor's dtype.

        `grad_weight` is G (out, in), the gradient of the full weight. Multiplication by S and the sums use at
        least fp32 (fp64).
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

        `residual` is W_R (out, in) and `squared_norm` is ‖W_R‖², 0-dim fp64.
        """
        wide = torch.promote_types(residual.dtype, torch.float32)
        with no_autocast(residual.device.type):
            left = (self.u.detach().to(wide) * self.s.detach().to(wide)).to(residual.dtype)
            right = self.v.detach().to(residual.dtype)
            across = (left * (residual @ right.t())).sum(dtype=torch.float64)
            own = ((left.t() @ left) * (right @ right.t())).sum(dtype=torch.float64)
        return squared_norm + 2 * across + own
