"""One rank's shard of a model with no other ranks, so that a cut can be sized in one process.

The same plan, layers and order as `tensor_parallel.shard_model`, without DeepSpeed and without groups: sums
over ranks return what this one has, so shapes and what autograd keeps are right, and values are not.
Not covered: computing anything.
"""

from __future__ import annotations

from torch import Tensor, nn

from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.engine.tensor_parallel.shard_model import (
    attention_sizes,
    plan_for,
    replace_conv1d,
    restore_sizes,
)
from megalowbit.layers.tensor_parallel.linear import Cut, parallel_linear


class LoneGroup(TensorGroup):
    """Rank 0 of `size` ranks that are not there."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def sum(self, tensor: Tensor) -> Tensor:
        """This rank's own."""
        return tensor

    def start_sum(self, tensor: Tensor) -> None:
        """Nothing to wait for."""

    def largest(self, values: Tensor) -> Tensor:
        """This rank's own."""
        return values

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As many times this rank's own."""
        return [tensor] * self.size


def shard_alone(model: nn.Module, size: int) -> None:
    """Leave rank 0's shard of a model, in place.

    Args:
        model: a GPT-2 or LLaMA of transformers, with plain layers, whole; real or fake tensors.
        size: tensor-parallel ranks; nothing happens where there is one.

    Raises:
        UserError: the model cannot be cut so.
    """
    if size == 1:
        return
    plan, group = plan_for(model, size), LoneGroup(size)
    transposed = replace_conv1d(model)
    sizes = attention_sizes(model, plan)
    for name, layer in list(model.named_modules()):
        last = name.rpartition(".")[2]
        is_row = last in plan.row
        if not (isinstance(layer, nn.Linear) and (is_row or last in plan.column)):
            continue
        num_parts = plan.column.get(last, 1)
        parts = (layer.weight.shape[int(is_row)] // num_parts,) * num_parts
        bias = layer.bias
        new = parallel_linear(
            _shard(layer.weight, Cut(int(is_row), parts), size),
            bias if bias is None or is_row else _shard(bias, Cut(0, parts), size),
            group,
            is_row=is_row,
            parts=parts,
            is_transposed=name in transposed,
        )
        new.train(layer.training)
        model.set_submodule(name, new)
    restore_sizes(model, sizes, plan, size)


def _shard(parameter: Tensor, cut: Cut, size: int) -> nn.Parameter:
    return nn.Parameter(cut.cut(parameter.detach(), 0, size), requires_grad=parameter.requires_grad)
