"""Sizes required by the quantizers of the Metis repository (`seed_compat`), which do not pad blocks of 16.

The recipe alone determines along which axis each quantizer blocks its operand, in backward too. A layer
therefore checks all sizes in its forward, and the message names the layer.
"""

from __future__ import annotations

from typing import NamedTuple

from megalowbit.errors import UserError
from megalowbit.layers.matmul.quantizations import Quantizations
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.seed_compat import SeedCompatQuantizer

AXES = {  # of each operand as a matrix: rows, columns
    "input": ("tokens", "in_features"),
    "weight": ("out_features", "in_features"),
    "grad_output": ("tokens", "out_features"),
}
_REMEDIES = {
    "in_features": "leave the layer out with recipe.keep",
    "out_features": "leave the layer out with recipe.keep",
    "tokens": "choose batch size and sequence length so that their product holds whole blocks",
}


class NeededBlocks(NamedTuple):
    """A quantizer without padding.

    Attributes:
        axis: the axis that must hold whole blocks: "in_features", "out_features" or "tokens".
        field: the recipe field that names the quantizer.
        name: the quantizer's name.
        multiple: the size must be a multiple of this.
        is_of_backward: whether only gradients need it.
    """

    axis: str
    field: str
    name: str
    multiple: int
    is_of_backward: bool


def needed_blocks(recipe: Recipe) -> tuple[NeededBlocks, ...]:
    """All quantizers of a recipe that do not pad, with the axes of their blocks."""
    found = []  # field, axis, quantizer, whether of backward
    for each in dict.fromkeys(Quantizations.of(recipe)):
        rows, cols = AXES[each.operand]
        found.append(
            (each.field, rows if each.is_transposed else cols, each.name, "forward" not in each.field)
        )
    for operand, axes in AXES.items():
        split = getattr(recipe, f"split_{operand}")
        if split is not None and split.method != "mean":  # the mean is not quantised
            field = f"split_{operand}.q_factors"
            found += [(field, axis, split.q_factors, operand == "grad_output") for axis in axes]
    return tuple(
        NeededBlocks(axis, field, name, _multiple_of(name), is_of_backward)
        for field, axis, name, is_of_backward in found
        if _multiple_of(name) > 1
    )


def check_sizes(
    needed: tuple[NeededBlocks, ...], title: str, sizes: dict[str, int], is_training: bool
) -> None:
    """Reject sizes that a quantizer would reject now or in backward.

    In training a backward may follow; activation checkpointing hides this from a forward.

    Raises:
        UserError: a size does not hold whole blocks.
    """
    for axis, field, name, multiple, is_of_backward in needed:
        if sizes[axis] % multiple and (is_training or not is_of_backward):
            raise UserError(
                f"{title}: {axis} = {sizes[axis]} is not a multiple of {multiple}, which {name!r} ({field}) "
                f"needs because it does not pad: {_REMEDIES[axis]}, or name a quantizer without seed_compat"
            )


def _multiple_of(name: str) -> int:
    chosen = quantizer(name)
    return chosen.needs_multiple_of if isinstance(chosen, SeedCompatQuantizer) else 1
