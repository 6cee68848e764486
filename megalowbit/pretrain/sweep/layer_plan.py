"""A recipe for each layer: measured on the weights of a short run, chosen under a budget.

One layer at a time is quantised, with its own recipe and with each candidate, and `layer_damage` measures
what that does to the loss or to the gradient. Then layers get better recipes, first where the least budget
removes the most damage. A layer only changes if the difference is larger than two standard errors.

Damages are added up as if layers did not interact. `all_layers` shows how far that holds. Costs are those of
all layers together: siblings that get the same recipe share the bytes of their input. They change one by one,
so the first must fit into the budget alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from megalowbit.errors import UserError, unknown_name
from megalowbit.layers.conversion.convert import bit_layers, convert, restore
from megalowbit.layers.conversion.kept_layers import keeping
from megalowbit.layers.conversion.precision_switch import quantizes_in
from megalowbit.layers.layer_recipe import operand_quantizers
from megalowbit.layers.recipe import NO_MODEL, Recipe, recipes
from megalowbit.pretrain.sweep.layer_costs import COSTS, CostKind, LayerCost, layer_cost, total
from megalowbit.pretrain.sweep.layer_damage import MEASURES, Measure, Progress, measured, split_into_sequences
from megalowbit.quantize.names import quantizer

SIGNIFICANT = 2.0  # standard errors
ONE_LAYER: Mapping[str, Any] = {**NO_MODEL, "if_present": False}  # fields without effect on a layer
ROUNDING = 1e-9  # a share of the cost; layers which fill the budget exactly fit


@dataclass(frozen=True)
class Option:
    """One recipe for one layer.

    Attributes:
        recipe: of the layer.
        rises: float64 (sequences or batches,), see `layer_damage.measured`.
        cost: as a share of the cost of all layers; if weights are counted, 0 for the layer's first option.
    """

    recipe: Recipe
    rises: Tensor
    cost: LayerCost

    @property
    def damage(self) -> float:
        """The mean: nats per token, or a share of the gradient's power."""
        return self.rises.mean().item()

    @property
    def error(self) -> float:
        """Standard error of `damage`."""
        return _error(self.rises)

    @property
    def is_near_zero(self) -> bool:
        """Whether it may do nothing at all."""
        return abs(self.damage) <= SIGNIFICANT * self.error

    def gain_of(self, other: Option) -> float:
        """The damage that `other` avoids; 0 if that is not certain.

        A loss below that of the unquantised model is no damage, and getting there avoids none. The error is
        that of the text only: not of the weights, nor of the random numbers of rounding.
        """
        differences = self.rises - other.rises
        gain = min(differences.mean().item(), max(self.damage, 0.0) - max(other.damage, 0.0))
        is_certain = gain > SIGNIFICANT * _error(differences) and not self.is_near_zero
        return gain if is_certain else 0.0


@dataclass(frozen=True)
class LayerOptions:
    """What a layer may have.

    Attributes:
        name: of the layer.
        weights: number of its weights.
        options: the recipe's own first, then the candidates.
    """

    name: str
    weights: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class LayerPlan:
    """The recipes of the layers.

    Attributes:
        recipe: the recipe with the changed layers in `layers` or `keep`.
        layers: what was measured, in the model's order.
        chosen: name of each changed layer → its option, in the order of the choice.
        all_layers: damage of quantising all layers with the recipe as it was, and its standard error.
        loss: of the unquantised model, in nats per token.
        tokens: number of predicted tokens.
        measure: what was measured.
        cost_kind: in what costs are counted.
    """

    recipe: Recipe
    layers: tuple[LayerOptions, ...]
    chosen: Mapping[str, Option]
    all_layers: tuple[float, float]
    loss: float
    tokens: int
    measure: Measure
    cost_kind: CostKind

    @property
    def cost(self) -> float:
        """What the changes cost together, as a share of the cost of all layers."""
        return additional_cost(self.layers, self.chosen)


def plan_layers(
    model: nn.Module,
    recipe: Recipe,
    tokens: Tensor,
    *,
    length: int,
    budget: float,
    candidates: Sequence[Recipe] = (),
    measure: Measure = "loss",
    cost: CostKind = "weights",
    micro_tokens: int = 1024,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> LayerPlan:
    """Measure each layer with each recipe and choose; the model ends as it began.

    Args:
        model: a causal language model without BitLinear layers, in evaluation mode.
        recipe: quantises the layers; those that it keeps are not measured.
        tokens: (tokens,), held-out text; what is left after whole sequences is dropped.
        length: tokens of a sequence.
        budget: largest additional cost, as a share of the cost of all these layers with `recipe`.
        candidates: other recipes for single layers; none: `bf16`, which keeps a layer in high precision.
        measure: "loss" (of the forward's noise) or "gradient" (of the backward's).
        cost: "weights": of the changed layers. "bytes": kept for backward. "time": of the products.
        micro_tokens: tokens of a micro-batch, for bytes and time.
        seed: of stochastic rounding.
        progress: called after each measurement with the numbers of those done and of all.

    Raises:
        UserError: the recipe quantises nothing that is measured or splits parameters, budget or candidates
            are invalid, the text is too short, or a loss is not finite.
    """
    _check(recipe, budget, measure, cost)
    candidates = candidates or (recipes()["bf16"],)
    _check_splits([recipe, *candidates])
    sequences = split_into_sequences(tokens, length, measure)
    convert(model, recipe, seed=seed, rank=0)
    try:
        shapes = {name: (layer.sizes, layer.siblings) for name, layer in bit_layers(model).items()}
        own = {name: replace(recipe.of_layer(name), **ONE_LAYER) for name in shapes}
        options = _distinct(own, candidates)
        alone = [{name: each} for name, given in options.items() for each in given]
        rises, loss = measured(model, [own, *alone], sequences, measure, progress)
    finally:
        restore(model)
    layers = _layer_options(options, rises[1:], shapes, cost, micro_tokens)
    chosen = choose(layers, budget)
    return LayerPlan(
        recipe=_changed(model, recipe, chosen),
        layers=layers,
        chosen=chosen,
        all_layers=(rises[0].mean().item(), _error(rises[0])),
        loss=loss,
        tokens=sequences.shape[0] * length,
        measure=measure,
        cost_kind=cost,
    )


def _layer_options(
    options: Mapping[str, Sequence[Recipe]],
    rises: Tensor,
    shapes: Mapping[str, tuple[tuple[int, int], tuple[str, ...]]],
    kind: CostKind,
    tokens: int,
) -> tuple[LayerOptions, ...]:
    """Of each layer, its recipes with a row of `rises` each, and costs as shares of that of all layers.

    `shapes` has the sizes and the siblings of each layer.
    """
    costs = {
        name: [layer_cost(kind, each, shapes[name][0], tokens, shapes[name][1]) for each in given]
        for name, given in options.items()
    }
    whole = total(each[0] for each in costs.values())
    if kind == "weights":  # of the layers that change
        costs = {name: [LayerCost(0), *given[1:]] for name, given in costs.items()}
    rows, found = iter(rises), []
    for name, given in options.items():
        made = zip(given, costs[name], strict=True)
        of_layer = tuple(Option(recipe, next(rows), cost.relative_to(whole)) for recipe, cost in made)
        found.append(LayerOptions(name, math.prod(shapes[name][0]), of_layer))
    return tuple(found)


def choose(layers: Sequence[LayerOptions], budget: float) -> dict[str, Option]:
    """The layers that change and their options, in the order of the choice.

    Each round changes the layer that avoids the most damage for its cost, of those that still fit. What costs
    nothing goes first.

    Raises:
        UserError: the damage of a layer with its own recipe is not finite.
    """
    for each in layers:
        if not math.isfinite(each.options[0].damage):
            raise UserError(
                f"layer {each.name!r}: its damage with recipe {each.options[0].recipe.name!r} is "
                f"{each.options[0].damage}: name the layer in keep, or choose another recipe"
            )
    present = {each.name: each.options[0] for each in layers}
    chosen: dict[str, Option] = {}
    while True:
        spent = additional_cost(layers, chosen)
        left = budget * (1 + ROUNDING) - spent
        found = [
            (gain / cost if cost > ROUNDING else math.inf, layer.name, option)
            for layer in layers
            for option in layer.options
            if (gain := present[layer.name].gain_of(option)) > 0
            and (cost := additional_cost(layers, {**chosen, layer.name: option}) - spent) <= left
        ]
        if not found:
            return chosen
        _, name, option = max(found, key=lambda each: each[0])
        present[name] = chosen[name] = option


def additional_cost(layers: Sequence[LayerOptions], changes: Mapping[str, Option]) -> float:
    """What changes cost together, in addition to the layers' first options: a share of the cost of all."""
    before = total(each.options[0].cost for each in layers)
    return total(changes.get(each.name, each.options[0]).cost for each in layers) - before


def to_json(plan: LayerPlan) -> dict[str, Any]:
    """The measurements and the recipe, as plain values."""
    return {
        "recipe": plan.recipe.to_dict(),
        "measure": plan.measure,
        "loss": plan.loss,
        "tokens": plan.tokens,
        "all_layers": {"damage": plan.all_layers[0], "error": plan.all_layers[1]},
        "cost_kind": plan.cost_kind,
        "cost": plan.cost,
        "chosen": {name: option.recipe.name for name, option in plan.chosen.items()},
        "layers": {
            layer.name: {
                "weights": layer.weights,
                "options": {
                    each.recipe.name: {
                        "damage": each.damage,
                        "error": each.error,
                        "cost": additional_cost(plan.layers, {layer.name: each}),  # if no other changes
                    }
                    for each in layer.options
                },
            }
            for layer in plan.layers
        },
    }


def table(plan: LayerPlan) -> str:
    """The options of all layers as text, most damage first."""
    unit = "nats" if plan.measure == "loss" else "share of the gradient's power"
    total = sum(each.weights for each in plan.layers)
    width = max(len(each.name) for each in plan.layers)
    names = max(len(each.recipe.name) for layer in plan.layers for each in layer.options)
    lines = [f"{'layer':<{width}}  weights  {'recipe':<{names}}  damage ({unit}, ± standard error)"]
    for layer in sorted(plan.layers, key=lambda each: each.options[0].damage, reverse=True):
        begin = f"{layer.name:<{width}}  {layer.weights / total:7.1%}"
        for option in layer.options:
            figures = f"{option.recipe.name:<{names}}  {option.damage:+.5f} ± {option.error:.5f}"
            share = additional_cost(plan.layers, {layer.name: option})
            cost = f"cost {share:+.1%}" if abs(share) > ROUNDING else ""
            zero = " ≈ 0" * option.is_near_zero
            mark = "  chosen" * (plan.chosen.get(layer.name) is option)
            lines.append(f"{begin}  {figures}{zero:<5}  {cost}{mark}".rstrip())
            begin = " " * len(begin)
    alone = sum(each.options[0].damage for each in plan.layers)
    together, error = plan.all_layers
    lines.append(
        f"all together {together:+.5f} ± {error:.5f}, sum of their own {alone:+.5f}; "
        f"loss in high precision {plan.loss:.4f} over {plan.tokens:,} tokens"
    )
    if abs(together) <= SIGNIFICANT * error:
        lines.append(
            "all together they do no certain damage, so this plan says little: take more text, or weights "
            "that have been trained longer, in bf16"
        )
    return "\n".join(lines)


def summary(plan: LayerPlan, budget: float) -> str:
    """One line: what changes, and what it costs."""
    of = {"weights": "of the weights", "bytes": "more bytes for backward", "time": "more time of products"}
    if not plan.chosen:
        return "change nothing: no option that fits into the budget avoids damage of two standard errors"
    changes = ", ".join(f"{name} → {option.recipe.name}" for name, option in plan.chosen.items())
    return f"{plan.cost:.1%} {of[plan.cost_kind]} (budget {budget:.1%}): {changes}"


def _changed(model: nn.Module, recipe: Recipe, chosen: Mapping[str, Option]) -> Recipe:
    """The recipe of a model, which is not converted, with other recipes for the chosen layers."""
    kept = [name for name, option in chosen.items() if not option.recipe.quantizes]
    own = [(name, option.recipe) for name, option in chosen.items() if option.recipe.quantizes]
    used = keeping(model, recipe, list(chosen)).layers  # that decide about other layers, also to keep them
    return replace(recipe, name=f"{recipe.name}-planned", keep=(*recipe.keep, *kept), layers=(*own, *used))


def _error(values: Tensor) -> float:
    return (values.std() / math.sqrt(len(values))).item()


def _check(recipe: Recipe, budget: float, measure: str, cost: str) -> None:
    if measure not in MEASURES:
        raise unknown_name("measure", measure, MEASURES)
    if cost not in COSTS:
        raise unknown_name("cost", cost, COSTS)
    if not 0 < budget < (1 if cost == "weights" else math.inf):
        expected = "a share of the weights above 0 and below 1, such as 0.15"
        if cost != "weights":
            expected = f"a share of the layers' {cost} above 0, such as 0.15"
        raise UserError(f"budget = {budget}: expected {expected}")
    if not recipe.quantizes:
        raise UserError(
            f"recipe {recipe.name!r} quantises nothing, so there is nothing to plan: name another"
        )
    is_measured, where, other = {
        "loss": (quantizes_in(recipe, "forward"), "forward", "the gradient"),
        "gradient": (any(map(_quantizes_backward, recipe.variants)), "backward", "the loss"),
    }[measure]
    if not is_measured:
        raise UserError(
            f"recipe {recipe.name!r} quantises nothing in the {where}, which is what is measured: measure "
            f"{other}, or choose another recipe"
        )


def _quantizes_backward(recipe: Recipe) -> bool:
    names = (
        each for product in ("grad_input", "grad_weight") for each in operand_quantizers(recipe, product)
    )
    return not all(quantizer(name).is_identity for name in names)


def _check_splits(recipes: Sequence[Recipe]) -> None:
    for each in recipes:
        if each.parameter_split is not None:
            raise UserError(
                f"recipe {each.name!r} has parameter_split, whose damage and cost are not measured: set it "
                "to null for the plan, and add it to the planned recipe"
            )


def _distinct(own: Mapping[str, Recipe], candidates: Sequence[Recipe]) -> dict[str, list[Recipe]]:
    """The options of each layer: its own recipe and the candidates that do something else.

    Raises:
        UserError: two recipes have one name.
    """
    known: dict[str, Recipe] = {}
    given = [replace(each, **ONE_LAYER) for each in candidates]
    for each in (*own.values(), *given):
        if known.setdefault(each.name, each) != each:
            raise UserError(f"two recipes are called {each.name!r}: give one of them another name")
    different = list({_nameless(each): each for each in reversed(given)}.values())[::-1]
    return {
        name: [each, *(other for other in different if _nameless(other) != _nameless(each))]
        for name, each in own.items()
    }


def _nameless(recipe: Recipe) -> Recipe:
    """What a recipe does, to be compared."""
    return replace(recipe, name="any")
