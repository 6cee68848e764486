"""A peer for layers with a split: the same mathematics in plain PyTorch operations, as in research code.

Operands are fake-quantised in fp32 (E2M1 in blocks of 1 × 16 with fp32 scales, stochastic). The output
gradient is factored by `torch.svd_lowrank`, recombined, and multiplied in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fake_quantised(x: Tensor) -> Tensor:
    """x, (…, features), rounded stochastically to the E2M1 grid of blocks of 16."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = blocks.abs().amax(-1, keepdim=True) / 6 + 1e-9
    magnitude = (blocks / scale).abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = torch.floor(magnitude / step + torch.rand_like(magnitude)) * step
    return (rounded * scale * blocks.sign()).flatten(-2)


class EagerSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, rank: int) -> Tensor:
        x, weight = fake_quantised(x), fake_quantised(weight)
        ctx.save_for_backward(x, weight)
        ctx.rank = rank
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        u, s, v = torch.svd_lowrank(grad, q=ctx.rank, niter=0)
        low_rank = (u * s) @ v.t()
        u, v = fake_quantised(u.t().contiguous()).t(), fake_quantised(v.t().contiguous()).t()
        recombined = (u * s) @ v.t() + fake_quantised(grad - low_rank)
        return recombined @ weight, recombined.t() @ x, grad.sum(0), None


class EagerSplitLinear(torch.nn.Linear):
    """An fp32 `nn.Linear` with such operands; sizes must be multiples of 16."""

    def __init__(self, in_features: int, out_features: int, *, rank: int, device: str) -> None:
        super().__init__(in_features, out_features, device=device)
        self.rank = rank

    def forward(self, input: Tensor) -> Tensor:
        return EagerSplit.apply(input, self.weight, self.bias, self.rank)
