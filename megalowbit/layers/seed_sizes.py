"""Sizes that quantisers of the Metis repository (`seed_compat`) need: they do not pad their blocks of 16.

Which axis a quantiser sees follows from the recipe alone, also for what runs in backward. So a layer checks
them all in its forward, and the message names the layer.
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
    """A quantiser without padding.

    Attributes:
        axis: whose size must hold whole blocks: "in_features", "out_features" or "tokens".
        field: of the recipe that names the quantiser.
        name: of the quantiser.
        multiple: what the size must be a multiple of.
        is_of_backward: whether only gradients need it.
    """

    axis: str
    field: str
    name: str
    multiple: int
    is_of_backward: bool


def needed_blocks(recipe: Recipe) -> tuple[NeededBlocks, ...]:
    """All quantisers of a recipe that do not pad, with the axes that they see."""
    found = []  # field, axis, quantiser, whether of backward
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
    """Refuse sizes (of each axis) that a quantiser would refuse, now or in backward.

    In training there may be a backward; activation checkpointing hides that from a forward.

    Raises:
        UserError: a size does not hold whole blocks.
    """
    for axis, field, name, multiple, is_of_backward in needed:
        if sizes[axis] % multiple and (is_training or not is_of_backward):
            raise UserError(
                f"{title}: {axis} = {sizes[axis]} is no multiple of {multiple}, which {name!r} ({field}) "
                f"needs because it does not pad: {_REMEDIES[axis]}, or name a quantizer without seed_compat"
            )


def _multiple_of(name: str) -> int:
    chosen = quantizer(name)
    return chosen.needs_multiple_of if isinstance(chosen, SeedCompatQuantizer) else 1
