"""Linear layers sharded over tensor-parallel ranks, and how a tensor is divided into shards.

Two kinds, used in pairs:

- A column-parallel layer holds some of the output features: weight (out/T, in) with T ranks. Its input is the
  same on all ranks and its output is a shard. The gradient of its input is summed over the ranks.
- A row-parallel layer holds some of the input features: weight (out, in/T). Its input is a shard and its
  output is summed over the ranks. All ranks hold the full bias, which is added once, after the sum.

Sums are exchanged in the dtype of the products (bf16 if the model computes in bf16), as in DeepSpeed's
AutoTP. A group of one rank exchanges nothing.

The engine creates the shards and the group. Not covered: layers that gather their output, sequence
parallelism, uneven shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.errors import UserError
from megalowbit.layers.matmul.sharded_operands import SumGradient, SumOutput
from megalowbit.layers.state_dict_layout import HFStateDict


@dataclass(frozen=True)
class Sharding:
    """How a whole tensor is cut: along one axis, in parts (q, k, v, say) of which each rank gets its share.

    Attributes:
        dim: the axis, ≥ 0.
        parts: sizes of the parts along it in the full tensor; each rank gets an equal share of every part.
    """

    dim: int
    parts: tuple[int, ...]

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """One rank's shard: its share of every part, one after the other, copied to new memory.

        Raises:
            UserError: the tensor's size is not the sum of the parts, or a part is not divisible.
        """
        if tensor.shape[self.dim] != sum(self.parts):
            raise UserError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be divided into parts {self.parts} along "
                f"axis {self.dim}: use the tensor of the model that the parts were written for"
            )
        for part in self.parts:
            if part % size:
                raise UserError(
                    f"a part of {part} is not divisible by {size} tensor ranks: choose a divisor of {part}"
                )
        pieces = [
            part.narrow(self.dim, rank * (part.shape[self.dim] // size), part.shape[self.dim] // size)
            for part in tensor.split(self.parts, self.dim)
        ]
        return torch.cat(pieces, self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the shards of all ranks, in order; inverse of `shard`."""
        sizes = [part // len(shards) for part in self.parts]
        pieces = [shard.split(sizes, self.dim) for shard in shards]
        return torch.cat([each[index] for index in range(len(sizes)) for each in pieces], self.dim)

    def full_shape(self, shard: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor, from that of a shard."""
        return (*shard[: self.dim], sum(self.parts), *shard[self.dim + 1 :])


def tensor_group_of(modules: Iterable[nn.Module]) -> TensorGroup | None:
    """The tensor-parallel group of the first sharded layer (all have the same); None if none is sharded."""
    groups = (each.__dict__.get("tensor_group") for each in modules)
    return next((group for group in groups if group is not None), None)


class _ShardedLinear(HFStateDict):
    """Base of both kinds.

    Attributes:
        in_features, out_features: sizes of the shard.
        tensor_group: the tensor-parallel ranks.
        is_transposed: whether it replaces a transformers `Conv1D`, which stores its weight as (in, out).
        is_row: whether the input features are sharded, not the output features.
    """

    tensor_group: TensorGroup
    is_row: ClassVar[bool]

    def extra_repr(self) -> str:
        """Sizes as `nn.Linear` prints them, and the rank."""
        return f"{super().extra_repr()}, shard {self.tensor_group.rank} of {self.tensor_group.size}"


class ColumnParallelLinear(_ShardedLinear):
    """A linear layer with this rank's share of the output features; made by `parallel_linear`."""

    is_row = False

    def forward(self, input: Tensor) -> Tensor:
        """(…, in_features), the same on all ranks → (…, out_features), this rank's shard."""
        if self.tensor_group.size > 1:
            input = SumGradient.apply(input, self.tensor_group)
        return nn.functional.linear(input, self.weight, self.bias)


class RowParallelLinear(_ShardedLinear):
    """A linear layer with this rank's share of the input features and the full bias."""

    is_row = True

    def forward(self, input: Tensor) -> Tensor:
        """(…, in_features), this rank's shard → (…, out_features), the same on all ranks."""
        output = nn.functional.linear(input, self.weight)
        if self.tensor_group.size > 1:
            output = SumOutput.apply(output, self.tensor_group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def parallel_linear(
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    group: TensorGroup,
    *,
    is_row: bool,
    parts: Sequence[int],
    is_transposed: bool = False,
) -> ColumnParallelLinear | RowParallelLinear:
    """A layer whose parameters are shards already; marks them as Megatron does, and with their `sharding`.

    `weight` is (out_features, in_features) of the shard; `bias` a shard of a column-parallel layer's, the
    whole of a row-parallel one's, or `None`. `parts` are those of `Sharding`, along the axis that is cut.
    """
    kind = RowParallelLinear if is_row else ColumnParallelLinear
    layer: ColumnParallelLinear | RowParallelLinear = kind(
        weight.shape[1], weight.shape[0], bias=bias is not None, device="meta"
    )
    layer.weight = weight
    layer.register_parameter("bias", bias)
    layer.tensor_group, layer.is_transposed = group, is_transposed
    mark_sharding(weight, Sharding(int(is_row), tuple(parts)))
    if bias is not None and not is_row:
        mark_sharding(bias, Sharding(0, tuple(parts)))
    elif bias is not None:
        bias.tensor_model_parallel = False  # type: ignore[attr-defined]  # it is not sharded
    return layer


def mark_sharding(parameter: nn.Parameter, sharding: Sharding) -> None:
    """Say that a parameter is a shard, in Megatron's attribute, and how its whole was cut."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.sharding = sharding  # type: ignore[attr-defined]
