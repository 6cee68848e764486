"""Builds rank 0's shard of a model in a single process, to estimate its memory.

Uses the same plan, layers and order as `tensor_parallel.shard_model`, but neither DeepSpeed nor process
groups. Sums over ranks return this rank's tensor: shapes and the tensors saved by autograd are correct,
values are not, so the shard cannot be used to compute.
"""

from __future__ import annotations

from torch import Tensor, nn

from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.engine.tensor_parallel.shard_model import (
    divisible_family,
    module_sizes,
    put_shard,
    replace_conv1d,
    restore_sizes,
)
from megalowbit.layers.tensor_parallel.linear import Sharding


class SimulatedGroup(TensorGroup):
    """Rank 0 of a group of `size` ranks, of which only this one exists."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def start_sum(self, tensor: Tensor) -> None:
        """Returns None: there is nothing to wait for."""

    def largest(self, values: Tensor) -> Tensor:
        return values

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """This rank's tensor, `size` times."""
        return [tensor] * self.size


def keep_first_shard(model: nn.Module, size: int) -> None:
    """Reduce a full model to rank 0's shard, in place.

    The model must belong to a known family and have plain layers; its tensors may be fake.
    """
    if size == 1:
        return
    family, group = divisible_family(model, size), SimulatedGroup(size)
    transposed = replace_conv1d(model)
    sizes = module_sizes(model, family)
    for name, layer in list(model.named_modules()):
        projection = family.projection(name)
        if projection is None or not isinstance(layer, nn.Linear):
            continue
        is_row, num_parts = projection
        parts = (layer.weight.shape[int(is_row)] // num_parts,) * num_parts
        weight, bias = _shard(layer.weight, Sharding(int(is_row), parts), size), layer.bias
        if bias is not None and not is_row:
            bias = _shard(bias, Sharding(0, parts), size)
        put_shard(model, name, weight, bias, group, projection, name in transposed)
    restore_sizes(model, sizes, family, size)


def _shard(parameter: Tensor, sharding: Sharding, size: int) -> nn.Parameter:
    return nn.Parameter(sharding.shard(parameter.detach(), 0, size), requires_grad=parameter.requires_grad)
