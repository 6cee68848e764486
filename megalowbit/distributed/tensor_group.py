"""The ranks that hold the shards of one tensor, and the collectives over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalowbit.errors import UserError


class TensorGroup:
    """The ranks that hold the shards of one layer, and the sums over them.

    Copies of a layer share it; it cannot be pickled, as no process group can.

    Attributes:
        group: the process group, this process in it.
        rank: of this process, 0 … size-1.
        size: number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in the tensor's dtype; overwrites the tensor where it is contiguous."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def start_sum(self, tensor: Tensor) -> Any:
        """Begin to sum a contiguous tensor in place: what to `wait()` for, or `None`."""
        if self.size == 1:
            return None
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def largest(self, values: Tensor) -> Tensor:
        """The largest over all ranks, element by element, in place; no value may be NaN, which MAX drops."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape, in order; collective."""
        if self.size == 1:
            return [tensor]
        tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(tensors, tensor.contiguous(), group=self.group)
        return tensors

    def __deepcopy__(self, memo: object) -> TensorGroup:
        return self

    def __reduce__(self) -> Any:
        raise UserError(
            "a tensor-parallel layer cannot be pickled, its process group belongs to this process: "
            "save model.state_dict() instead"
        )
