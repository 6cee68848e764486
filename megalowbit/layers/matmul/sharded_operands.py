"""Sharded operands of a tensor-parallel layer, and what its ranks exchange.

With T tensor-parallel ranks, each rank multiplies

    layer              input           weight          grad_output     summed over the ranks
    column-parallel    (M, K) full     (N/T, K)        (M, N/T)        grad_input (M, K)
    row-parallel       (M, K/T)        (N, K/T)        (M, N) full     output (M, N)

A sharded operand may need the amax of the full tensor for its scale. The ranks exchange it before quantising,
in one all-reduce for all operands of a pass. Scales, and codes rounded to nearest, are therefore those of a
single process. With stochastic rounding, all ranks use the same random numbers for a full operand, and
different ones for shards.

Column-parallel siblings (q, k and v; gate and up) read one input. Their input gradients are added up on each
rank, and the sum is summed over the ranks once: see `SumGradient`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.layers.matmul.quantizations import OPERANDS, Quantization
from megalowbit.layers.siblings import InputForms
from megalowbit.quantize.hadamard import GROUP
from megalowbit.quantize.quantized_tensor import matrix_shape
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.quantize.tensor_statistics import needs_maximum, tensor_maximum


class AmaxRequest(NamedTuple):
    """An operand about to be quantised, whose amax may be needed.

    Attributes:
        quantization: the quantisation to come.
        tensor: the operand, or this rank's shard.
        signs: signs of its Hadamard transform, or `None`.
    """

    quantization: Quantization
    tensor: Tensor
    signs: int | None

    def local_amax(self) -> Tensor:
        """The amax of the matrix that this rank's quantizer gets: fp32, 0-dim."""
        chosen = self.quantization.quantizer
        assert isinstance(chosen, BlockQuantizer)  # `needs_maximum` selects these only
        matrix = self.tensor.detach().reshape(matrix_shape(self.tensor.shape))
        if self.quantization.is_transposed:
            matrix = matrix.t()  # blocks run along the original rows
        if self.signs is not None and matrix.shape[1] % GROUP:  # zeros do not change the amax
            matrix = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % GROUP))
        return tensor_maximum(matrix, chosen.encoding, self.signs)


@dataclass(frozen=True)
class ShardedOperands:
    """Which operands of one layer are shards, and the collectives on them.

    Attributes:
        group: the tensor-parallel ranks.
        is_row: row-parallel: the input features are sharded, not the output features.
        sums_grad_input: whether the layer sums its input gradient itself; otherwise `sum_for_siblings` has
            arranged it.
    """

    group: TensorGroup
    is_row: bool
    sums_grad_input: bool = True

    def holds(self, role: str) -> bool:
        """Whether this operand is a shard; otherwise it is the same on all ranks."""
        return OPERANDS[role] in ("weight", "input" if self.is_row else "grad_output")

    def shard_of(self, role: str) -> int | None:
        """This rank for a sharded operand; `None` for a full one."""
        return self.group.rank if self.holds(role) else None

    def is_reported(self, role: str) -> bool:
        """Whether this rank reports an operand's counts: all ranks for a shard, rank 0 for a full operand."""
        return self.holds(role) or self.group.rank == 0

    def maxima(self, requests: Iterable[AmaxRequest]) -> dict[str, Tensor]:
        """Amax of the full tensors by role, for operands that need one; at most one all-reduce."""
        needed = [
            each
            for each in requests
            if self.holds(each.quantization.role) and needs_maximum(each.quantization.quantizer)
        ]
        if not needed or self.group.size == 1:
            return {}
        found = self.group.largest(torch.stack([each.local_amax() for each in needed]))
        return {each.quantization.role: found[index] for index, each in enumerate(needed)}

    def sum_output(self, output: Tensor, bias: Tensor | None) -> Tensor:
        """Sum the output over the ranks, then add the bias once."""
        assert self.is_row
        output = self.group.sum(output)
        return output if bias is None else output + bias.to(output.dtype)

    def start_sum_grad_input(self, grad_input: Tensor | None) -> Any:
        """Start to sum grad_input in place, if needed; returns an object to `wait()` for, or `None`."""
        is_summed = self.is_row or not self.sums_grad_input
        return None if is_summed or grad_input is None else self.group.start_sum(grad_input)

    def sum_for_siblings(self, input: Tensor, forms: InputForms) -> Tensor | None:
        """The input as siblings read it, whose gradient is summed once; `None`: the layer sums its own."""
        if forms.summed is None:
            forms.summed = input, SumGradient.apply(input, self.group)
        original, summed = forms.summed
        # another tensor with the same memory may have another history, so its gradient goes elsewhere
        is_same = original is input
        # one that a sibling without a graph (`no_grad`, reentrant checkpointing) has made passes none on
        has_graph = input.requires_grad and torch.is_grad_enabled()
        return summed if is_same and (summed.grad_fn is not None) == has_graph else None


class SumGradient(torch.autograd.Function):
    """The identity; its gradient is summed over the ranks.

    Each of the two functions is the backward of the other, so all derivatives are right.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: TensorGroup) -> Tensor:
        """Return a view of the input."""
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Sum a copy of the gradient."""
        return SumOutput.apply(grad_output, ctx.group), None


class SumOutput(torch.autograd.Function):
    """The sum over the ranks; its gradient is already the same on every rank."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, group: TensorGroup) -> Tensor:
        """Sum a copy of the output."""
        ctx.group = group
        return group.sum(output.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return a view of the gradient, whose own gradient differs between the ranks and is summed."""
        return SumGradient.apply(grad_output, ctx.group), None
