"""Which operands of a tensor-parallel layer are shards, and what its ranks tell each other about them.

    column-parallel    weight and grad_output in shards, input whole     grad_input is summed over the ranks
    row-parallel       weight and input in shards, grad_output whole     output is summed over the ranks

A sharded operand whose scale depends on the largest number of the whole tensor gets that number first: all
that are quantised in one pass travel in one packet. So scales, and codes rounded to nearest, are those of a
single process. Whole operands are rounded with the same random numbers on every rank, sharded ones with
numbers of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.layers.recipe import Recipe
from megalowbit.layers.tensor_parallel.linear import TensorGroup
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantized_tensor import matrix_shape
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.quantize.tensor_statistics import needs_maximum, tensor_maximum

WEIGHT_ROLES = frozenset({"weight", "backward_weight"})
INPUT_ROLES = frozenset({"input", "backward_input"})
GRADIENT_ROLES = frozenset({"grad_output", "grad_output_transposed", "grad_output_for_weight"})
SPLITS = ("split_input", "split_weight", "split_grad_output", "parameter_split")


class Asked(NamedTuple):
    """An operand about to be quantised, whose largest magnitude may be needed.

    Attributes:
        role: as the layer calls it.
        tensor: the operand.
        name: of its quantiser.
        is_transposed: whether blocks lie along its rows.
        signs: of its Hadamard transform, or `None`.
    """

    role: str
    tensor: Tensor
    name: str
    is_transposed: bool = False
    signs: int | None = None


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
        return role in WEIGHT_ROLES or role in (INPUT_ROLES if self.is_row else GRADIENT_ROLES)

    def shard_of(self, role: str) -> int | None:
        """This rank, for an operand in shards; `None` for a whole one."""
        return self.group.rank if self.holds(role) else None

    def is_reported(self, role: str) -> bool:
        """Whether this rank reports an operand's counts: of a whole one, only the first rank does."""
        return self.holds(role) or self.group.rank == 0

    def maxima(self, asked: Iterable[Asked]) -> dict[str, Tensor]:
        """Largest magnitudes of whole tensors by role, of those that need one; one all-reduce at most."""
        needed = [each for each in asked if self.holds(each.role) and needs_maximum(quantizer(each.name))]
        if not needed or self.group.size == 1:
            return {}
        found = self.group.largest(torch.stack([_local_maximum(each) for each in needed]))
        return {each.role: found[index] for index, each in enumerate(needed)}

    def sum_output(self, output: Tensor, bias: Tensor | None) -> Tensor:
        """The output of all ranks, and the bias once."""
        assert self.is_row
        output = self.group.sum(output)
        return output if bias is None else output + bias.to(output.dtype)

    def start_sum_grad_input(self, grad_input: Tensor | None) -> Any:
        """Begin to sum grad_input in place, where it has to be: what to `wait()` for, or `None`."""
        return None if self.is_row or grad_input is None else self.group.start_sum(grad_input)


def _local_maximum(asked: Asked) -> Tensor:
    chosen = quantizer(asked.name)
    assert isinstance(chosen, BlockQuantizer)  # others need none
    matrix = asked.tensor.detach().reshape(matrix_shape(asked.tensor.shape))
    if asked.is_transposed:
        if asked.signs is not None and matrix.shape[0] % 16:
            matrix = torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[0] % 16))
        matrix = matrix.t()
    return tensor_maximum(matrix, chosen.encoding, asked.signs)


def check_sharded_recipe(recipe: Recipe, title: str, *, is_row: bool, shards: Iterable[int]) -> None:
    """Refuse a recipe that shards cannot be quantised with, each for itself.

    Args:
        recipe: of the layer.
        title: of the layer, for the message.
        is_row: whether input features are cut.
        shards: what a rank has of each part of the axis that is cut.

    Raises:
        UserError: it splits operands, a quantiser needs the whole tensor, or blocks would straddle shards.
    """
    for field in SPLITS:
        if getattr(recipe, field) is not None:
            raise UserError(
                f"recipe {recipe.name!r} has {field}, which needs whole tensors, and {title} is cut over "
                f"tensor-parallel ranks: set {field} to null, or tensor_parallel.autotp_size to 1"
            )
    for name, is_transposed, along_rows in _cut_operands(recipe, is_row):
        chosen = quantizer(name)
        needs_maximum(chosen)  # says what cannot be quantised in shards
        block = chosen.encoding.format.block if isinstance(chosen, BlockQuantizer) else None
        if block is None:
            continue
        extent = block[0] if along_rows != is_transposed else block[1]
        for shard in shards:
            if shard % extent:
                raise UserError(
                    f"{title}: a shard of {shard} features does not hold whole blocks of {extent} of "
                    f"{name!r}: lower tensor_parallel.autotp_size, keep the layer in high precision, or take "
                    "formats of one scale a tensor (recipe fp8; in speculation also a ladder without mixed)"
                )


def _cut_operands(recipe: Recipe, is_row: bool) -> list[tuple[str, bool, bool]]:
    """Quantiser, whether transposed, whether rows are cut: of each operand in shards."""
    is_per_gemm = recipe.layout == "per_gemm"
    found = [
        (recipe.q_forward_weight, False, not is_row),
        (recipe.q_backward_weight, is_per_gemm, not is_row),
    ]
    if is_row:
        found += [(recipe.q_forward_input, False, False), (recipe.q_backward_input, is_per_gemm, False)]
    else:
        found.append((recipe.q_backward_outputgrad, False, False))
        found.append((recipe.outputgrad_for_weight, is_per_gemm, False))
    return found
