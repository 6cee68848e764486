"""One rank's shard of a model with no other ranks, so that a cut can be sized in one process.

The same plan, layers and order as `tensor_parallel.shard_model`, without DeepSpeed and without groups: sums
over ranks return what this one has, so shapes and what autograd keeps are right, and values are not.
Not covered: computing anything.
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
    """Rank 0 of `size` ranks that are not there."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def start_sum(self, tensor: Tensor) -> None:
        """Nothing to wait for."""

    def largest(self, values: Tensor) -> Tensor:
        return values

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As many times this rank's own."""
        return [tensor] * self.size


def keep_first_shard(model: nn.Module, size: int) -> None:
    """Leave rank 0's shard of a model of real or fake tensors, in place.

    The model is of one of the families, with plain layers, whole.
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
