"""Which operands of a tensor-parallel layer are shards, and what its ranks exchange.

    column-parallel    weight and grad_output in shards, input whole     grad_input is summed over the ranks
    row-parallel       weight and input in shards, grad_output whole     output is summed over the ranks

A sharded operand whose scale depends on the largest magnitude of the whole tensor gets that number first: all
that are quantised in one pass travel in one packet. So scales, and codes rounded to nearest, are those of a
single process. Whole operands are rounded with the same random numbers on every rank, sharded ones with
different numbers on each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.layers.matmul.quantizations import OPERANDS, Quantization
from megalowbit.quantize.quantized_tensor import matrix_shape
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.quantize.tensor_statistics import needs_maximum, tensor_maximum


class AmaxRequest(NamedTuple):
    """An operand about to be quantised, whose largest magnitude may be needed.

    Attributes:
        quantization: what will be done with it.
        tensor: the operand, or this rank's shard.
        signs: of its Hadamard transform, or `None`.
    """

    quantization: Quantization
    tensor: Tensor
    signs: int | None

    def local_amax(self) -> Tensor:
        """The largest magnitude that this rank's quantiser will see: fp32, 0-dim."""
        chosen = self.quantization.quantizer
        assert isinstance(chosen, BlockQuantizer)  # others need none
        matrix = self.tensor.detach().reshape(matrix_shape(self.tensor.shape))
        if self.quantization.is_transposed:
            if self.signs is not None and matrix.shape[0] % 16:
                matrix = torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[0] % 16))
            matrix = matrix.t()
        return tensor_maximum(matrix, chosen.encoding, self.signs)


@dataclass(frozen=True)
class ShardedOperands:
    """What one layer's products need to know about its shards.

    Attributes:
        group: the ranks that hold them.
        is_row: whether input features are cut, and not output features.
    """

    group: TensorGroup
    is_row: bool

    def holds(self, role: str) -> bool:
        """Whether this operand is a shard; otherwise it is the same on all ranks."""
        return OPERANDS[role] in ("weight", "input" if self.is_row else "grad_output")

    def shard_of(self, role: str) -> int | None:
        """This rank, for an operand in shards; `None` for a whole one."""
        return self.group.rank if self.holds(role) else None

    def is_reported(self, role: str) -> bool:
        """Whether this rank reports an operand's counts: of a whole one, only the first rank does."""
        return self.holds(role) or self.group.rank == 0

    def maxima(self, requests: Iterable[AmaxRequest]) -> dict[str, Tensor]:
        """Largest magnitudes of whole tensors by role, of those that need one; one all-reduce at most."""
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
        """The output of all ranks, and the bias once."""
        assert self.is_row
        output = self.group.sum(output)
        return output if bias is None else output + bias.to(output.dtype)

    def start_sum_grad_input(self, grad_input: Tensor | None) -> Any:
        """Begin to sum grad_input in place, where it has to be: what to `wait()` for, or `None`."""
        return None if self.is_row or grad_input is None else self.group.start_sum(grad_input)
