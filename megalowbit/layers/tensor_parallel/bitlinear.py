"""Low-bit layers on shards: `ColumnParallelLinear` and `RowParallelLinear` with BitLinear's three products.

`convert` makes them from the plain layers, and `restore` converts them back. Each rank multiplies its shard;
`sharded_operands` lists what the ranks exchange. Gradients and outputs are summed in the dtype of the
products. A row-parallel layer adds its bias after that sum, so in bf16 the sum is rounded once before the
bias is added; a single process rounds after adding it.

Not covered: recipes with splits, which need full tensors, and quantizers with scales from means.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import nn

from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.layer_recipe import SPLIT_FIELDS
from megalowbit.layers.matmul.quantizations import Quantizations
from megalowbit.layers.matmul.sharded_operands import ShardedOperands
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalowbit.quantize.hadamard import GROUP
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.quantize.tensor_statistics import needs_maximum


class ParallelBitLinear(BitLinear):
    """Base of both kinds; `convert` makes it from the plain layer, whose attributes it keeps."""

    tensor_group: TensorGroup
    plain_class: ClassVar[type[nn.Linear]]
    is_row: ClassVar[bool]

    @property
    def shards(self) -> ShardedOperands | None:
        """Which operands are shards; `None` in a group of one rank."""
        return ShardedOperands(self.tensor_group, self.is_row) if self.tensor_group.size > 1 else None

    def check_recipe(self, recipe: Recipe) -> None:
        """See `check_sharded_recipe`.

        Raises:
            UserError: the recipe cannot be applied to shards of this layer.
        """
        super().check_recipe(recipe)
        if self.tensor_group.size > 1:
            shards = [part // self.tensor_group.size for part in self.weight.sharding.parts]  # type: ignore[attr-defined]
            check_sharded_recipe(recipe, self.title, is_row=self.is_row, shards=shards)

    def extra_repr(self) -> str:
        """BitLinear's text, and the rank."""
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


def check_sharded_recipe(recipe: Recipe, title: str, *, is_row: bool, shards: Iterable[int]) -> None:
    """Reject a recipe that cannot quantise each shard separately.

    `shards` are this rank's sizes of each part of the sharded axis; messages name the layer by `title`.

    Raises:
        UserError: it splits operands, a quantizer needs the full tensor, or blocks would cross shards.
    """
    for field in SPLIT_FIELDS:
        if getattr(recipe, field) is not None:
            raise UserError(
                f"recipe {recipe.name!r} has {field}, which needs full tensors, and {title} is sharded over "
                f"tensor-parallel ranks: set {field} to null, or tensor_parallel.autotp_size to 1"
            )
    quantizations = sorted(Quantizations.of(recipe), key=lambda each: each.operand != "weight")
    for each in quantizations:  # weights first
        if each.operand not in ("weight", "input" if is_row else "grad_output"):
            continue
        chosen = each.quantizer
        needs_maximum(chosen)  # raises if the quantizer cannot work on shards
        block = chosen.encoding.format.block if isinstance(chosen, BlockQuantizer) else None
        if block is None and each.is_transformed:
            block = 1, GROUP  # a group of the transform; blocks hold whole groups
        if block is None:
            continue
        is_sharded_along_rows = each.operand == "weight" and not is_row
        extent = block[0] if is_sharded_along_rows != each.is_transposed else block[1]
        for shard in shards:
            if shard % extent:
                raise UserError(
                    f"{title}: a shard of {shard} features does not hold whole blocks of {extent} of "
                    f"{each.name!r}: lower tensor_parallel.autotp_size, keep the layer in high "
                    "precision, or use formats with one scale a tensor (recipe fp8; in speculation also "
                    "candidates without mixed)"
                )
