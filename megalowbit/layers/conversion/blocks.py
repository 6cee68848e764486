"""The first and last transformer blocks of a model, which a recipe may leave in high precision.

This module does not depend on model families. The blocks are the modules in the only outermost
`nn.ModuleList` that holds linear layers, such as `model.layers`. Modules in it without linear layers do not
count. A model without such a list, or with several (an encoder and a decoder), is rejected, because a wrong
guess would silently train another model than intended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from megalowbit.errors import UserError
from megalowbit.layers.recipe import Recipe

REMEDY = "name the layers in the recipe's keep instead, such as 'transformer.h.0'"
_ROUNDING = 1e-9  # 0.07 of 100 blocks is 7.000000000000001 in floating point, and means 7


def reasons_to_keep_blocks(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    recipe: Recipe,
    others: Mapping[str, nn.Module] | None = None,
) -> dict[str, str]:
    """Reasons to keep the layers in the blocks that `recipe.keep_first` and `keep_last` select.

    Shares of the number of blocks are rounded up. `others` are further names with the modules that hold the
    named parameters; they are not searched for blocks.

    Returns:
        Reason by name; empty if the recipe keeps no blocks.

    Raises:
        UserError: the model has no list of blocks, or several, or no block would be left to quantise.
    """
    if not recipe.keep_first and not recipe.keep_last:
        return {}
    blocks = find_blocks(model, layers)
    first, last = (count_blocks(share, len(blocks)) for share in (recipe.keep_first, recipe.keep_last))
    if first + last >= len(blocks):
        raise UserError(
            f"recipe {recipe.name!r} keeps the first {first} and the last {last} of the {len(blocks)} blocks "
            f"of {type(model).__name__}, which leaves none: lower keep_first or keep_last, "
            "or use the recipe 'bf16'"
        )
    reasons = {}
    ends = (("first", blocks[:first]), ("last", blocks[len(blocks) - last :]))
    for end, kept in ends:
        reason = f"among the {end} {len(kept)} blocks" if len(kept) > 1 else f"in the {end} block"
        inside = {id(module) for block in kept for module in block.modules()}
        named = {**layers, **(others or {})}
        reasons.update({name: reason for name, layer in named.items() if id(layer) in inside})
    return reasons


def find_blocks(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The blocks, in order, of a model with these linear layers.

    Raises:
        UserError: the model has no list of blocks, or several.
    """
    linear = {id(layer) for layer in layers.values()}
    found: dict[str, nn.ModuleList] = {}
    inside: set[int] = set()  # modules inside a list already found; parents come before children
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside and _holds(module, linear):
            found[name] = module
            inside |= {id(each) for each in module.modules()}
    kind = type(model).__name__
    if not found:
        raise UserError(
            f"keep_first and keep_last: {kind} has no nn.ModuleList with linear layers in it: {REMEDY}"
        )
    if len(found) > 1:
        names = ", ".join(map(repr, found))
        raise UserError(f"keep_first and keep_last: {kind} has several lists of blocks ({names}): {REMEDY}")
    (blocks,) = found.values()
    return [block for block in blocks.children() if _holds(block, linear)]


def count_blocks(share: int | float, num_blocks: int) -> int:
    """The number of blocks to keep; a share is rounded up."""
    if isinstance(share, int):
        return share
    return max(1, math.ceil(share * num_blocks - _ROUNDING)) if share else 0


def _holds(module: nn.Module, linear: set[int]) -> bool:
    return any(id(each) in linear for each in module.modules())
