"""Collectives over the tensor-parallel ranks of a layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalowbit.distributed import collectives
from megalowbit.errors import UserError


class TensorGroup:
    """The ranks that hold the shards of one layer, and collectives over them.

    Copies of a layer share it. Like a process group, it cannot be pickled.

    Attributes:
        group: the process group; includes this process.
        rank: this process's rank in it, 0 … size-1.
        size: number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in the tensor's dtype; overwrites the tensor if it is contiguous."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        collectives.all_reduce(tensor, group=self.group)
        return tensor

    def start_sum(self, tensor: Tensor) -> Any:
        """Start to sum a contiguous tensor in place; returns a handle to `wait()` on, or `None`."""
        if self.size == 1:
            return None
        return collectives.all_reduce(tensor, group=self.group, async_op=True)

    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum over all ranks, in place. No value may be NaN, because MAX drops NaN."""
        if self.size > 1:
            collectives.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in rank order; collective. All must have the same shape."""
        if self.size == 1:
            return [tensor]
        tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        collectives.all_gather(tensors, tensor.contiguous(), group=self.group)
        return tensors

    def __deepcopy__(self, memo: object) -> TensorGroup:
        return self

    def __reduce__(self) -> Any:
        raise UserError(
            "a tensor-parallel layer cannot be pickled because its process group belongs to this process: "
            "save model.state_dict() instead"
        )
