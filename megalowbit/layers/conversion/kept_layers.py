"""Which layers a recipe keeps, and why: output head, tied weights, names in `keep`, blocks.

Weights outside linear layers without such a reason are missed. This module does not import transformers: a
model with `Conv1D` layers has imported it already.
"""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.blocks import reasons_to_keep_blocks
from megalowbit.layers.conversion.report import KeptLayer, MissedWeight
from megalowbit.layers.conversion.standalone_weights import StandaloneWeight, standalone_weights
from megalowbit.layers.recipe import Recipe, matches, recipes
from megalowbit.layers.tensor_parallel.bitlinear import LOW_BIT


class Selection(NamedTuple):
    """The decisions of a recipe about a model's layers.

    Attributes:
        to_swap: linear layers by name, in the model's order.
        kept: see `ConversionReport`.
        missed: see `ConversionReport`.
        unmatched: see `ConversionReport`.
    """

    to_swap: dict[str, nn.Module]
    kept: tuple[KeptLayer, ...]
    missed: tuple[MissedWeight, ...]
    unmatched: tuple[str, ...]


def select_layers(model: nn.Module, recipe: Recipe) -> Selection:
    """Which linear layers to convert, which to keep and why, and which weights are missed.

    Raises:
        UserError: a pattern of `layers` has no effect, `if_present` is not in `layers`, or see
            `reasons_to_keep`.
    """
    if recipe.if_present:
        raise UserError(
            f"recipe {recipe.name!r} has if_present, which is for recipes in layers: leave it out"
        )
    layers = linear_layers(model)
    standalone = standalone_weights(model, layers, output_heads(model))
    kept = reasons_to_keep(model, layers, recipe, standalone)
    _check_effects((*layers, *standalone), recipe, kept)
    return _selection(layers, standalone, recipe, kept)


def _selection(
    layers: dict[str, nn.Module],
    standalone: dict[str, StandaloneWeight],
    recipe: Recipe,
    kept: Mapping[str, str],
) -> Selection:
    reasons = {**_unquantized((*layers, *standalone), recipe), **kept}
    if not recipe.quantizes:
        reasons, standalone = {name: reasons.get(name, "the recipe quantises nothing") for name in layers}, {}
    kinds = {name: type(layer).__name__ for name, layer in layers.items()}
    kinds |= {name: each.kind for name, each in standalone.items()}
    optional = recipe.keep_if_present if recipe.quantizes else ()
    is_present = any(matches(name, pattern) for name in kinds for pattern in optional)
    return Selection(
        {name: layer for name, layer in layers.items() if name not in reasons},
        tuple(KeptLayer(name, kind, reasons[name]) for name, kind in kinds.items() if name in reasons),
        tuple(
            MissedWeight(
                name, each.shape, f"a parameter of {each.kind}, and no linear layer's weight", each.owner_name
            )
            for name, each in standalone.items()
            if name not in reasons
        ),
        () if is_present else _named_by_the_user(optional),
    )


def _named_by_the_user(patterns: Sequence[str]) -> tuple[str, ...]:
    """Without those of shipped recipes, which name layers of several model families."""
    if not patterns:
        return ()
    shipped = {pattern for each in recipes().values() for pattern in each.keep_if_present}
    return tuple(pattern for pattern in patterns if pattern not in shipped)


def conv1d_class() -> type[nn.Module] | None:
    """The `Conv1D` of transformers; None if transformers is not imported."""
    module = sys.modules.get("transformers.pytorch_utils")
    return getattr(module, "Conv1D", None)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, low-bit or not."""
    conv1d = conv1d_class()
    return isinstance(module, nn.Linear) or (conv1d is not None and isinstance(module, conv1d))


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All linear layers of a model by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if is_linear(module)}


def reasons_to_keep(
    model: nn.Module, layers: dict[str, nn.Module], recipe: Recipe, standalone: Mapping[str, StandaloneWeight]
) -> dict[str, str]:
    """The reason for each kept layer or weight, by name; converted and missed ones have none.

    Raises:
        UserError: a pattern of `keep` matches nothing, or see `reasons_to_keep_blocks`.
    """
    heads, others = output_heads(model), {**_task_heads(model), **_read_by_torch(model)}
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    plain = (nn.Linear, conv1d_class(), *LOW_BIT)
    reasons = {
        name: f"named by the recipe's {field}"
        for field in ("keep_if_present", "keep")
        for name in (*layers, *standalone)
        if any(matches(name, pattern) for pattern in getattr(recipe, field))
    }
    for name, layer in layers.items():
        if name in reasons:
            continue
        if id(layer) in heads:
            reasons[name] = "output head"
        elif id(layer) in others:
            reasons[name] = others[id(layer)]
        elif isinstance(layer, BitLinear):
            reasons[name] = "already a BitLinear"
        elif type(layer) not in plain:
            reasons[name] = "a subclass of nn.Linear, not a plain linear layer"
        elif owners[id(layer.weight)] > 1:
            reasons[name] = "its weight is tied to another module's"
    for name, weight in standalone.items():
        if name not in reasons and weight.reason is not None:
            reasons[name] = weight.reason
    for pattern in recipe.keep:
        if not any(matches(name, pattern) for name in (*layers, *standalone)):
            raise _matches_nothing("keep", pattern, layers)
    holders = {name: each.owner for name, each in standalone.items()}
    return {**reasons_to_keep_blocks(model, layers, recipe, holders), **reasons}


def _unquantized(names: Sequence[str], recipe: Recipe) -> dict[str, str]:
    """The reason for each layer or weight whose recipe quantises nothing, if layers have several recipes."""
    own = {name: recipe.of_layer(name) for name in names} if recipe.layers else {}
    return {
        name: f"its recipe {each.name!r} quantises nothing"
        for name, each in own.items()
        if not each.quantizes
    }


def _check_effects(names: Sequence[str], recipe: Recipe, kept: Mapping[str, str]) -> None:
    """Reject a pattern of the recipe's `layers` that decides about none of these layers and weights.

    Args:
        names: of all linear layers and standalone weights.
        recipe: whose `layers` are checked.
        kept: those that stay in high precision whatever `layers` says, with the reasons.
    """
    decided = {name: [pattern for pattern, _ in recipe.layers if matches(name, pattern)] for name in names}
    effective = {decided[name][0] for name in names if name not in kept and decided[name]}
    for pattern, own in recipe.layers:
        if pattern in effective or own.if_present:
            continue
        matched = [name for name in names if pattern in decided[name]]
        if not matched:
            raise _matches_nothing("layers", pattern, names)
        name = next((each for each in matched if each not in kept), None)
        if name is None:
            reason = f"{matched[0]} is kept as it is ({kept[matched[0]]}), like all others that it matches"
            raise UserError(
                f"layers pattern {pattern!r} has no effect: {reason}: remove it, or choose a base without it"
            )
        raise UserError(
            f"layers pattern {pattern!r} has no effect: {decided[name][0]!r} is before it and matches "
            f"{name}, and the same holds for all others: put the narrower pattern first, or if it comes from "
            f"the base, give {pattern!r} itself another recipe"
        )


def keeping(model: nn.Module, recipe: Recipe, names: Sequence[str]) -> Recipe:
    """The recipe with more layers in `keep`, and without patterns of `layers` that then have no effect.

    Args:
        model: not converted.
        recipe: for this model.
        names: of the layers.

    Raises:
        UserError: see `reasons_to_keep`.
    """
    wider = replace(recipe, keep=(*recipe.keep, *names))
    if not recipe.layers:
        return wider
    layers = linear_layers(model)
    standalone = standalone_weights(model, layers, output_heads(model))
    kept = reasons_to_keep(model, layers, wider, standalone)
    left = [name for name in (*layers, *standalone) if name not in kept]
    first = {next((key for key, _ in recipe.layers if matches(name, key)), None) for name in left}
    return replace(wider, layers=tuple(each for each in recipe.layers if each[0] in first))


def output_heads(model: nn.Module) -> set[int]:
    """Ids of the output heads in a model."""
    return {id(head) for head in map(_output_head, model.modules()) if head is not None}


def _output_head(module: nn.Module) -> nn.Module | None:
    get_head = getattr(module, "get_output_embeddings", None)
    if not callable(get_head):
        return None
    try:
        head = get_head()
    except (NotImplementedError, AttributeError):  # what models without a head raise
        return None
    return head if isinstance(head, nn.Module) else None


def _task_heads(model: nn.Module) -> dict[int, str]:
    """Ids of linear layers of a Hugging Face model outside its base model, such as a classifier's head."""
    found: dict[int, str] = {}
    for module in model.modules():
        prefix = getattr(module, "base_model_prefix", None)
        base = getattr(module, prefix, None) if isinstance(prefix, str) and prefix else None
        if isinstance(base, nn.Module) and base is not module:
            inside = {id(each) for each in base.modules()}
            heads = [each for each in module.modules() if is_linear(each) and id(each) not in inside]
            found |= dict.fromkeys(map(id, heads), "a head, outside the base model")
    return found


def _read_by_torch(model: nn.Module) -> dict[int, str]:
    """Ids of layers whose weights torch's encoder reads itself in evaluation, without calling the layers."""
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    reason = "nn.TransformerEncoderLayer reads its weight in evaluation, without calling it"
    return {id(layer): reason for each in encoders for layer in (each.linear1, each.linear2)}


def _matches_nothing(field: str, pattern: str, layers: Collection[str]) -> UserError:
    near = difflib.get_close_matches(pattern, layers, n=1, cutoff=0.0)
    hint = f"the nearest linear layer is {near[0]!r}" if near else "the model has no linear layers"
    return UserError(f"{field} pattern {pattern!r} matches no linear layer: {hint}")


def missed_weights(model: nn.Module, recipe: Recipe) -> tuple[MissedWeight, ...]:
    """`ConversionReport.missed` of a model that the recipe may have converted already."""
    layers = linear_layers(model)
    standalone = standalone_weights(model, layers, output_heads(model))
    if not recipe.quantizes or not standalone:
        return ()
    return _selection(layers, standalone, recipe, reasons_to_keep(model, layers, recipe, standalone)).missed
