"""The plan of layers to keep, against a second computation and a model with one sensitive layer."""

import json
import math

import pytest
import torch
from tiny_models import tiny_config

from megalowbit.errors import UserError
from megalowbit.hf.model import random_model
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.recipe import Recipe, recipe
from megalowbit.pretrain.sweep.layer_plan import LayerDamage, LayerPlan, choose, plan_layers, table

SENSITIVE = "transformer.h.1.mlp.c_fc"
LENGTH = 16


@pytest.fixture
def model():
    """A model of which one layer has inputs that 4 bits cannot hold, and weights that make them count."""
    found = random_model(tiny_config("gpt2"), seed=3).eval()
    with torch.no_grad():
        norm, layer = found.transformer.h[1].ln_2, found.get_submodule(SENSITIVE)
        norm.weight[:2] *= 300  # outliers, whose blocks lose all other elements
        layer.weight[:2] /= 300
        layer.weight *= 30
        found.lm_head.weight *= 10  # confident predictions, which noise can spoil
    return found


@pytest.fixture
def tokens():
    return torch.randint(0, 64, (40 * LENGTH + 1,), generator=torch.Generator().manual_seed(0))


def test_the_damage_of_a_layer_is_the_mean_change_of_the_loss_with_its_error(model, tokens):
    plan = plan_layers(model, recipe("nvfp4"), tokens, length=LENGTH, budget=0.3)
    assert not bit_layers(model)
    reference = torch.empty(2, 40, dtype=torch.float64)
    others = [each.name for each in plan.layers if each.name != SENSITIVE]
    for row, chosen in enumerate(("bf16", {"base": "nvfp4", "keep": others})):
        convert(model, chosen, seed=0, rank=0)
        for index in range(40):
            part = tokens[index * LENGTH : (index + 1) * LENGTH + 1]
            with torch.no_grad():
                logits = model(input_ids=part[None, :-1]).logits[0].double()
            reference[row, index] = -logits.log_softmax(-1)[torch.arange(LENGTH), part[1:]].mean()
    change = reference[1] - reference[0]
    (found,) = [each for each in plan.layers if each.name == SENSITIVE]
    assert found.damage == pytest.approx(change.mean().item(), abs=2e-6)
    assert found.error == pytest.approx(change.std().item() / math.sqrt(40), abs=2e-6)
    assert plan.loss == pytest.approx(reference[0].mean().item(), abs=2e-6)
    assert plan.tokens == 40 * LENGTH


def test_the_sensitive_layer_is_kept_and_the_recipe_converts_all_others(model, tokens):
    plan = plan_layers(model, recipe("nvfp4"), tokens, length=LENGTH, budget=0.3)
    assert plan.kept[0] == SENSITIVE
    assert plan.share <= 0.3
    again = Recipe.from_dict(json.loads(json.dumps(plan.recipe.to_dict())))
    report = convert(model, again)
    assert {each.name for each in report.swapped} == {each.name for each in plan.layers} - set(plan.kept)


def test_layers_are_chosen_by_damage_for_their_size_within_the_budget():
    layers = [
        LayerDamage("large", 60, 0.6, 0.01),
        LayerDamage("small", 10, 0.3, 0.01),
        LayerDamage("unclear", 10, 0.3, 0.2),
        LayerDamage("harmless", 20, -0.1, 0.01),
    ]
    assert choose(layers, 0.5) == ("small",)
    assert choose(layers, 0.69) == ("small",)
    assert choose(layers, 0.7) == ("small", "large")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 1}, "budget = 1: expected a share"),
        ({"budget": math.nan}, "budget = nan: expected a share"),
        ({"recipe": recipe("bf16")}, "'bf16' quantises nothing"),
        ({"tokens": torch.zeros(100, dtype=torch.long)}, "100 tokens, 6 sequences of 16: give at least 8"),
    ],
)
def test_mistakes_are_named(model, tokens, changes, message):
    given = {"recipe": recipe("nvfp4"), "tokens": tokens, "length": LENGTH, "budget": 0.15, **changes}
    with pytest.raises(UserError, match=message):
        plan_layers(model, given.pop("recipe"), given.pop("tokens"), **given)


def test_weights_that_give_no_finite_loss_are_refused(model, tokens):
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = math.inf
    with pytest.raises(UserError, match="not finite"):
        plan_layers(model, recipe("nvfp4"), tokens, length=LENGTH, budget=0.15)


def test_a_recipe_without_a_quantised_forward_is_refused(model, tokens):
    with pytest.raises(UserError, match="'mxfp4-rht' quantises nothing in the forward"):
        plan_layers(model, recipe("mxfp4-rht"), tokens, length=LENGTH, budget=0.1)


def test_only_damage_within_two_errors_is_marked_as_near_zero():
    layers = tuple(LayerDamage(name, 8, damage, 0.001) for name, damage in (("a", 0.0015), ("b", -0.01)))
    plan = LayerPlan(recipe("nvfp4"), layers, (), (0.0, 0.001), 2.0, 100)
    assert ["≈ 0" in line for line in table(plan).splitlines()[1:3]] == [True, False]
