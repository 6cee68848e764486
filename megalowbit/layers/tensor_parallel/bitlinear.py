"""Low-bit layers on shards: `ColumnParallelLinear` and `RowParallelLinear` with BitLinear's three products.

They are what `convert` makes of those layers, and `restore` undoes. Each rank multiplies its shard; what the
ranks exchange is said in `sharded_operands`. Gradients and outputs are summed in the dtype that the products
come out in. The bias of a row-parallel layer is added after that sum, so in bf16 it meets a number rounded
once already, which a single process rounds after the bias.

Not covered: recipes with splits, which need whole tensors, and quantisers with scales from means.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.matmul.sharded_operands import ShardedOperands, check_sharded_recipe
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, TensorGroup


class ParallelBitLinear(BitLinear):
    """What both kinds share; made by `convert` from the plain layer, whose attributes it keeps."""

    tensor_group: TensorGroup
    plain_class: ClassVar[type[nn.Linear]]
    is_row: ClassVar[bool]

    @property
    def shards(self) -> ShardedOperands | None:
        """Which operands are shards; `None` in a group of one rank."""
        return ShardedOperands(self.tensor_group, self.is_row) if self.tensor_group.size > 1 else None

    def check_recipe(self, recipe: Recipe) -> None:
        """See `sharded_operands.check_sharded_recipe`.

        Raises:
            UserError: the layer cannot be quantised so, in shards.
        """
        super().check_recipe(recipe)
        if self.tensor_group.size > 1:
            shards = [part // self.tensor_group.size for part in self.weight.cut.parts]  # type: ignore[attr-defined]
            check_sharded_recipe(recipe, self._title(), is_row=self.is_row, shards=shards)

    def extra_repr(self) -> str:
        """As BitLinear prints it, and the rank."""
        return f"{super().extra_repr()}, shard {self.tensor_group.rank} of {self.tensor_group.size}"


class ColumnParallelBitLinear(ParallelBitLinear):
    """A low-bit `ColumnParallelLinear`."""

    plain_class = ColumnParallelLinear
    is_row = False


class RowParallelBitLinear(ParallelBitLinear):
    """A low-bit `RowParallelLinear`."""

    plain_class = RowParallelLinear
    is_row = True


LOW_BIT: dict[type[nn.Module], type[BitLinear]] = {
    kind.plain_class: kind for kind in (ColumnParallelBitLinear, RowParallelBitLinear)
}
