"""Which layers a recipe should keep in high precision: measured on the weights of a short run.

One layer at a time is quantised, and the loss on held-out text is compared with that of the unquantised
model, sequence by sequence. The difference is the layer's damage, with a standard error over the sequences.
Then the layers with the most damage for their size are kept, as long as the budget lasts. A layer whose
damage is within two standard errors of zero is never kept.

Only the forward pass is measured. A layer's size stands for its cost, because bytes and time of its products
are proportional to its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalowbit.errors import UserError
from megalowbit.families.config_checks import check_fits
from megalowbit.layers.conversion.convert import bit_layers, convert, restore
from megalowbit.layers.conversion.precision_switch import quantizes_in
from megalowbit.layers.recipe import Recipe

BATCH = 16  # sequences
SIGNIFICANT = 2.0  # standard errors
FEWEST_SEQUENCES = 8


@dataclass(frozen=True)
class LayerDamage:
    """What quantising one layer does to the loss.

    Attributes:
        name: of the layer.
        weights: number of its weights.
        damage: mean increase of the loss, in nats per token.
        error: standard error of `damage` over sequences.
    """

    name: str
    weights: int
    damage: float
    error: float

    @property
    def is_significant(self) -> bool:
        """Whether the loss certainly rises."""
        return self.damage > SIGNIFICANT * self.error

    @property
    def is_near_zero(self) -> bool:
        """Whether the loss may not change at all."""
        return abs(self.damage) <= SIGNIFICANT * self.error


@dataclass(frozen=True)
class LayerPlan:
    """The layers to keep.

    Attributes:
        recipe: the recipe, with these layers in `keep`.
        layers: what was measured, in the model's order.
        kept: names of the layers to keep, most damage for their size first.
        all_layers: damage of quantising all layers together, and its standard error.
        loss: of the unquantised model, in nats per token.
        tokens: number of predicted tokens.
    """

    recipe: Recipe
    layers: tuple[LayerDamage, ...]
    kept: tuple[str, ...]
    all_layers: tuple[float, float]
    loss: float
    tokens: int

    @property
    def share(self) -> float:
        """Share of the layers' weights that is kept."""
        total = sum(each.weights for each in self.layers)
        return sum(each.weights for each in self.layers if each.name in self.kept) / total


def plan_layers(
    model: nn.Module, recipe: Recipe, tokens: Tensor, *, length: int, budget: float, seed: int = 0
) -> LayerPlan:
    """Measure each layer and choose those to keep; the model ends as it began.

    Args:
        model: a causal language model without BitLinear layers, in evaluation mode.
        recipe: quantises the layers; those it keeps anyway are not measured.
        tokens: (tokens,), held-out text; what is left after whole sequences is dropped.
        length: tokens of a sequence.
        budget: largest share of these layers' weights to keep, above 0 and below 1.
        seed: of stochastic rounding.

    Raises:
        UserError: the recipe quantises nothing in the forward, the budget is no such share, the text is too
            short, or the loss is not finite.
    """
    if not 0 < budget < 1:
        raise UserError(
            f"budget = {budget}: expected a share of the weights above 0 and below 1, such as 0.15"
        )
    if not quantizes_in(recipe, "forward"):
        raise UserError(f"recipe {recipe.name!r} quantises nothing in the forward, which is what is measured")
    sequences = _sequences(tokens, length)
    before = sequence_losses(model, sequences)
    if not before.isfinite().all():
        raise UserError("the loss of the unquantised model is not finite: choose the weights of another run")

    def damage(chosen: Recipe) -> tuple[float, float]:
        convert(model, chosen, seed=seed, rank=0)
        difference = sequence_losses(model, sequences) - before
        restore(model)
        return difference.mean().item(), (difference.std() / math.sqrt(len(difference))).item()

    convert(model, recipe, seed=seed, rank=0)
    sizes = {name: layer.in_features * layer.out_features for name, layer in bit_layers(model).items()}
    restore(model)
    if not sizes:
        raise UserError(f"recipe {recipe.name!r} quantises nothing: there is nothing to keep")
    found = [
        LayerDamage(name, size, *damage(_keeping(recipe, [each for each in sizes if each != name])))
        for name, size in sizes.items()
    ]
    kept = choose(found, budget)
    return LayerPlan(
        recipe=replace(_keeping(recipe, kept), name=f"{recipe.name}-planned"),
        layers=tuple(found),
        kept=kept,
        all_layers=damage(recipe),
        loss=before.mean().item(),
        tokens=sequences.shape[0] * length,
    )


def check_text(model: Any, tokens: Tensor, length: int) -> None:
    """Check that a Hugging Face model has all tokens and as many positions.

    Raises:
        UserError: it has not.
    """
    check_fits(model.config, vocab_size=int(tokens.max()) + 1, sequence_length=length)


def choose(layers: Sequence[LayerDamage], budget: float) -> tuple[str, ...]:
    """The layers with the most damage for their size that fit into this share of all weights.

    A layer that does not fit is passed over, and smaller ones after it may still be chosen.
    """
    left, kept = budget * sum(each.weights for each in layers), []
    for each in sorted(layers, key=lambda each: each.damage / each.weights, reverse=True):
        if each.is_significant and each.weights <= left:
            left -= each.weights
            kept.append(each.name)
    return tuple(kept)


@torch.no_grad()
def sequence_losses(model: Any, sequences: Tensor) -> Tensor:
    """The mean cross-entropy of each sequence in nats per token: float64 (sequences,).

    Args:
        model: a causal language model.
        sequences: (sequences, length + 1) tokens, each of which is predicted but the first.
    """
    device, found = next(model.parameters()).device, []
    for batch in sequences.to(device).split(BATCH):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
        found.append(losses.double().mean(1).cpu())
    return torch.cat(found)


def to_json(plan: LayerPlan) -> dict[str, Any]:
    """The measurements and the recipe, as plain values."""
    return {
        "recipe": recipe_block(plan),
        "loss": plan.loss,
        "tokens": plan.tokens,
        "all_layers": {"damage": plan.all_layers[0], "error": plan.all_layers[1]},
        "kept_share": plan.share,
        "layers": {
            each.name: {"weights": each.weights, "damage": each.damage, "error": each.error}
            for each in plan.layers
        },
    }


def recipe_block(plan: LayerPlan) -> Mapping[str, Any]:
    """The recipe as a block of a configuration."""
    return plan.recipe.to_dict()


def table(plan: LayerPlan) -> str:
    """The layers as text, most damage first."""
    total = sum(each.weights for each in plan.layers)
    width = max(len(each.name) for each in plan.layers)
    lines = [f"{'layer':<{width}}  weights   damage (nats, ± standard error)"]
    for each in sorted(plan.layers, key=lambda each: each.damage, reverse=True):
        mark = "kept" if each.name in plan.kept else "≈ 0" if each.is_near_zero else ""
        figures = f"{each.weights / total:7.1%}  {each.damage:+.5f} ± {each.error:.5f}  {mark}"
        lines.append(f"{each.name:<{width}}  {figures}".rstrip())
    alone = sum(each.damage for each in plan.layers)
    together, error = plan.all_layers
    lines.append(
        f"all together {together:+.5f} ± {error:.5f}, sum of the rows {alone:+.5f}; "
        f"loss in high precision {plan.loss:.4f} over {plan.tokens:,} tokens"
    )
    return "\n".join(lines)


def _keeping(recipe: Recipe, names: Sequence[str]) -> Recipe:
    return replace(recipe, keep=(*recipe.keep, *names))


def _sequences(tokens: Tensor, length: int) -> Tensor:
    count = (len(tokens) - 1) // length
    if count < FEWEST_SEQUENCES:
        raise UserError(
            f"the text has {len(tokens)} tokens, {count} sequences of {length}: "
            f"give at least {FEWEST_SEQUENCES}, better some hundred"
        )
    starts = torch.arange(count)[:, None] * length
    return tokens[starts + torch.arange(length + 1)]
