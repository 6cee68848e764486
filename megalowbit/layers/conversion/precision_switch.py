"""The late precision switch: layers of a model in training stop quantising.

NVFP4 training ends with a gap to bf16, and the last part of a run can close it in higher precision. Switching
the forward pass alone closes most of it (NVIDIA, "Pretraining LLMs with NVFP4", arXiv:2509.25149: from 1.5 %
to 0.5 %). Each layer gets a recipe derived from its current one:

- Scope "forward": the operands of `output` are not quantised. Those of the backward products are quantised as
  before, including the saved input and weight, so a step needs the same memory. Observers then get output
  gradients only.
- Scope "all": nothing is quantised, and weights are no longer split into parameters. Weights that are split
  stay split.

Not covered: switching back. To return to the former recipe, set `layer.recipe`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from torch import nn

from megalowbit.errors import UserError, unknown_name
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.layer_recipe import OPERAND_FIELDS, OWN_GRADIENT, PRODUCTS
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer
from megalowbit.values import require_module

Scope = Literal["forward", "all"]
IDENTITY = "fp32"
# Fields that stop being quantised, and the addition to the recipe's name.
SCOPES: dict[str, tuple[tuple[str, ...], str]] = {
    "forward": (("q_forward_input", "q_forward_weight"), "forward in high precision"),
    "all": (OPERAND_FIELDS, "all in high precision"),
}


def switch_precision(model: nn.Module, scope: Scope = "forward") -> int:
    """Stop quantisation in all BitLinear layers of a model; call it between a backward and the next forward.

    Args:
        model: a converted model.
        scope: "forward" or "all", see the module docstring.

    Returns:
        The number of switched layers; layers that quantise nothing in this scope do not change.

    Raises:
        UserError: the scope is unknown, the model has no BitLinear, or none that quantises in this scope.
    """
    require_module(model, "switch_precision")
    _check_scope(scope)
    layers = [module for module in model.modules() if isinstance(module, BitLinear)]
    chosen = [layer for layer in layers if quantizes_in(layer.recipe, scope)]
    if not chosen:
        raise UserError(
            f"precision switch {scope!r}: none of the {len(layers)} BitLinear layers of "
            f"{type(model).__name__} quantises that: convert the model first, and switch once"
        )
    for layer in chosen:
        layer.recipe = switched(layer.recipe, scope)
    return len(chosen)


def switched(recipe: Recipe, scope: Scope) -> Recipe:
    """The recipe of a layer, or of a model with all its layers, that stops quantising `scope`.

    Raises:
        UserError: the scope is unknown, or the recipe quantises nothing of it.
    """
    _check_scope(scope)
    if not quantizes_in(recipe, scope):
        raise UserError(
            f"precision switch {scope!r}: recipe {recipe.name!r} quantises nothing there: leave the switch "
            "out, or choose another recipe"
        )
    fields, title = SCOPES[scope]
    base = recipe.name.removesuffix(f", {SCOPES['forward'][1]}")  # "all" may follow "forward"
    name = f"{base}, {title}"
    if recipe.layers:
        alone = _switched_if_any(recipe.alone, scope)
        layers = [(key, _switched_if_any(each, scope)) for key, each in recipe.layers_without_split()]
        is_split = any(each.quantizes for each in (alone, *dict(layers).values()))
        split = recipe.parameter_split if is_split else None
        return replace(alone, name=name, layers=tuple(layers), parameter_split=split)
    changes: dict[str, Any] = dict.fromkeys(fields, IDENTITY)
    if scope == "all":
        changes[OWN_GRADIENT] = None
    names = {field: changes.get(field, getattr(recipe, field)) for field in (*OPERAND_FIELDS, OWN_GRADIENT)}
    if _is_identity(names["q_backward_input"]):
        changes["split_input"] = None
    if _is_identity(names["q_backward_weight"]):
        changes["split_weight"] = None
    if all(name is None or _is_identity(name) for name in names.values()):
        # These fields describe quantised operands, and a recipe without any rejects them.
        changes.update(layout="single_copy", hadamard=False, gemm="bf16", parameter_split=None)
        changes.update(split_grad_output=None)
    elif recipe.hadamard:
        changes["hadamard"] = tuple(
            product
            for product in recipe.transformed_products
            if not any(names[field] is not None and _is_identity(names[field]) for field in PRODUCTS[product])
        )
    return replace(recipe, name=name, **changes)


def quantizes_in(recipe: Recipe, scope: Scope) -> bool:
    """Whether a recipe quantises anything that a switch of this scope would stop."""
    if scope == "all":
        return recipe.quantizes
    names = (getattr(each, field) for each in recipe.variants for field in SCOPES[scope][0])
    return not all(map(_is_identity, names))


def _switched_if_any(recipe: Recipe, scope: Scope) -> Recipe:
    return switched(recipe, scope) if quantizes_in(recipe, scope) else recipe


def _is_identity(name: str) -> bool:
    return quantizer(name).is_identity


def _check_scope(scope: object) -> None:
    if scope not in SCOPES:
        raise unknown_name("scope of the precision switch", scope, SCOPES)
