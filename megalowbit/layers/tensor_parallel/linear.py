"""Linear layers of which every tensor-parallel rank holds a shard, and how a tensor is cut into shards.

Two kinds, used in pairs. A column-parallel layer holds some of the output features: its input is the same on
all ranks, its output a shard, and the gradients of its input are summed. A row-parallel layer holds some of
the input features: its input is a shard, the outputs are summed, and the bias, which all ranks hold alike,
is added once, after the sum. Sums travel in the dtype the products come out in (bf16, where a model computes
in bf16), as DeepSpeed's AutoTP does; in a group of one rank nothing travels.

Who makes the shards and the group is the engine's business. Not covered: layers that gather their output,
sequence parallelism, uneven shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.errors import UserError
from megalowbit.layers.state_dict_layout import HFStateDict


@dataclass(frozen=True)
class Sharding:
    """How a whole tensor is cut: along one axis, in parts (q, k, v, say) of which each rank gets its share.

    Attributes:
        dim: the axis, ≥ 0.
        parts: sizes along it in the whole tensor; each is cut evenly over the ranks.
    """

    dim: int
    parts: tuple[int, ...]

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """One rank's shard, in memory of its own: its share of every part, one after the other.

        Raises:
            UserError: the tensor is not as long as the parts, or a part does not divide.
        """
        if tensor.shape[self.dim] != sum(self.parts):
            raise UserError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be cut into parts {self.parts} along axis "
                f"{self.dim}: use the tensor of the model that the parts were written for"
            )
        for part in self.parts:
            if part % size:
                raise UserError(
                    f"a part of {part} does not divide by {size} tensor ranks: choose a divisor of {part}"
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
    """The ranks that share the first sharded layer among some modules, and so all of them; None: none is."""
    groups = (each.__dict__.get("tensor_group") for each in modules)
    return next((group for group in groups if group is not None), None)


class _ShardedLinear(HFStateDict):
    """What both kinds share.

    Attributes:
        in_features, out_features: of the shard.
        tensor_group: the ranks that hold the others.
        is_transposed: whether it stands for a transformers `Conv1D`, which keeps its weight as (in, out).
        is_row: whether input features are cut, and not output features.
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
        """(…, in_features), the same on all ranks → (…, out_features), this rank's."""
        if self.tensor_group.size > 1:
            input = _SumGradient.apply(input, self.tensor_group)
        return nn.functional.linear(input, self.weight, self.bias)


class RowParallelLinear(_ShardedLinear):
    """A linear layer with this rank's share of the input features; made by `parallel_linear`.

    Its bias is whole.
    """

    is_row = True

    def forward(self, input: Tensor) -> Tensor:
        """(…, in_features), this rank's → (…, out_features), the same on all ranks."""
        output = nn.functional.linear(input, self.weight)
        if self.tensor_group.size > 1:
            output = _SumOutput.apply(output, self.tensor_group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(grad_output.clone(memory_format=torch.contiguous_format)), None


class _SumOutput(torch.autograd.Function):
    """The sum over the ranks, whose gradient every rank has already."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, group: TensorGroup) -> Tensor:
        del ctx
        return group.sum(output.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad_output, None


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
        bias.tensor_model_parallel = False  # type: ignore[attr-defined]  # it is whole, whoever marked it
    return layer


def mark_sharding(parameter: nn.Parameter, sharding: Sharding) -> None:
    """Say that a parameter is a shard, in Megatron's attribute, and how its whole was cut."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.sharding = sharding  # type: ignore[attr-defined]
