"""The plan of layers, against second computations and a model with one sensitive layer."""

import json
import math

import pytest
import torch
from tiny_models import tiny_config

from megalowbit.errors import UserError
from megalowbit.hf.model import random_model
from megalowbit.layers.conversion.convert import bit_layers, convert, restore
from megalowbit.layers.recipe import Recipe, recipe
from megalowbit.pretrain.sweep.layer_costs import LayerCost
from megalowbit.pretrain.sweep.layer_plan import (
    LayerOptions,
    LayerPlan,
    Option,
    additional_cost,
    choose,
    plan_layers,
    summary,
    table,
)

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


def damages(plan, name):
    (layer,) = [each for each in plan.layers if each.name == name]
    return {each.recipe.name: (each.damage, each.error) for each in layer.options}


@pytest.mark.parametrize("other", ["mxfp4", "fp8"])
def test_the_damage_of_a_layer_is_the_mean_change_of_the_loss_with_its_error(model, tokens, other):
    plan = plan_layers(model, recipe("nvfp4"), tokens, length=LENGTH, budget=0.3, candidates=[recipe(other)])
    assert not bit_layers(model)
    reference = torch.empty(3, 40, dtype=torch.float64)
    others = [each.name for each in plan.layers if each.name != SENSITIVE]
    for row, chosen in enumerate(
        ("bf16", {"base": "nvfp4", "keep": others}, {"base": other, "keep": others})
    ):
        convert(model, chosen, seed=0, rank=0)
        for start in (0, 16, 32):
            rows = range(start, min(start + 16, 40))
            parts = torch.stack([tokens[index * LENGTH : (index + 1) * LENGTH + 1] for index in rows])
            with torch.no_grad():
                likely = model(input_ids=parts[:, :-1]).logits.double().log_softmax(-1)
            losses = -likely.gather(2, parts[:, 1:, None])[:, :, 0].mean(1)
            reference[row, rows.start : rows.stop] = losses
        restore(model)
    for row, name in enumerate(("nvfp4", other), start=1):
        change = reference[row] - reference[0]
        found = damages(plan, SENSITIVE)[name]
        assert found[0] == pytest.approx(change.mean().item(), abs=2e-6)
        assert found[1] == pytest.approx(change.std().item() / math.sqrt(40), abs=2e-6)
        assert abs(change.mean()) > 1e-4
    assert plan.loss == pytest.approx(reference[0].mean().item(), abs=2e-6)
    assert plan.tokens == 40 * LENGTH


def test_the_sensitive_layer_is_kept_and_the_recipe_converts_all_others(model, tokens):
    plan = plan_layers(model, recipe("nvfp4"), tokens, length=LENGTH, budget=0.3)
    assert next(iter(plan.chosen)) == SENSITIVE
    assert plan.cost <= 0.3
    weights = {each.name: each.weights for each in plan.layers}
    assert plan.cost == pytest.approx(sum(weights[each] for each in plan.chosen) / sum(weights.values()))
    again = Recipe.from_dict(json.loads(json.dumps(plan.recipe.to_dict())))
    report = convert(model, again)
    assert {each.name for each in report.swapped} == set(weights) - set(plan.chosen)


def test_layers_get_the_recipes_that_were_chosen(model, tokens):
    whole = recipe({"base": "nvfp4", "layers": {"*.mlp": "mxfp4", "*.h.0.*": "fp8"}})
    candidates = [recipe("mxfp8"), recipe("bf16")]
    plan = plan_layers(model, whole, tokens, length=LENGTH, budget=0.5, candidates=candidates, cost="time")
    option = plan.chosen[SENSITIVE]
    assert "*.mlp" in dict(plan.recipe.layers)  # decides about other layers, and would about this one
    assert option.recipe.name in ("mxfp8", "bf16")
    assert plan.cost <= 0.5
    convert(model, recipe(plan.recipe.to_dict()))
    layers = bit_layers(model)
    for each in plan.layers:
        expected = plan.chosen[each.name].recipe if each.name in plan.chosen else whole.of_layer(each.name)
        if expected.quantizes:
            assert layers[each.name].recipe.to_dict() | {"name": ""} == expected.to_dict() | {"name": ""}
        else:
            assert each.name not in layers
    assert SENSITIVE + " → " + option.recipe.name in summary(plan, 0.5)
    assert "more time of products (budget 50.0%)" in summary(plan, 0.5)


def option(name, damages, cost):
    cost = cost if isinstance(cost, LayerCost) else LayerCost(cost)
    return Option(recipe({"base": "nvfp4", "name": name}), torch.tensor(damages, dtype=torch.float64), cost)


def layer(name, *options):
    return LayerOptions(name, 8, options)


def sure(mean):
    """Rises with a small error."""
    return [mean - 0.01, mean + 0.01, mean - 0.01, mean + 0.01]


def test_layers_are_chosen_by_damage_for_their_cost_within_the_budget():
    layers = [
        layer("large", option("own", sure(0.6), 0), option("kept", sure(0.0), 0.6)),
        layer("small", option("own", sure(0.3), 0), option("kept", sure(0.0), 0.1)),
        layer("unclear", option("own", [0.0, 0.9, -0.3, 0.6], 0), option("kept", sure(0.0), 0.1)),
        layer("harmless", option("own", sure(-0.1), 0), option("kept", sure(0.0), 0.2)),
    ]
    assert list(choose(layers, 0.5)) == ["small"]
    assert list(choose(layers, 0.69)) == ["small"]
    assert list(choose(layers, 0.7)) == ["small", "large"]


def test_a_layer_is_improved_in_rungs_as_the_budget_grows():
    rungs = (option("own", sure(0.6), 0), option("eight", sure(0.1), 0.1), option("high", sure(0.0), 0.4))
    layers = [layer("a", *rungs), layer("b", option("own", sure(0.2), 0), option("eight", sure(0.0), 0.1))]

    def names(budget):
        return {name: each.recipe.name for name, each in choose(layers, budget).items()}

    assert names(0.05) == {}
    assert names(0.1) == {"a": "eight"}
    assert names(0.2) == {"a": "eight", "b": "eight"}
    assert names(0.4) == {"a": "eight", "b": "eight"}
    assert names(0.5) == {"a": "high", "b": "eight"}


def test_what_is_better_and_cheaper_needs_no_budget():
    layers = [layer("a", option("own", sure(0.6), 0), option("better", sure(0.1), -0.1))]
    layers.append(layer("b", option("own", sure(0.6), 0), option("better", sure(0.1), 0.1)))
    assert list(choose(layers, 0.001)) == ["a", "b"]


def test_a_loss_below_that_of_the_unquantised_model_is_no_damage():
    def gain(one, other):
        return option("one", sure(one), 0).gain_of(option("other", sure(other), 0))

    assert gain(0.3, 0.1) == pytest.approx(0.2)
    assert gain(0.3, -0.2) == pytest.approx(0.3)
    assert gain(-0.1, -0.5) == gain(0.1, 0.3) == gain(-0.1, 0.2) == 0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_layer_whose_own_damage_is_not_finite_is_named(value):
    fine, broken = (layer(name, option("own", [each] * 4, 0)) for name, each in (("a", 1.0), ("b", value)))
    with pytest.raises(UserError, match=rf"layer 'b': its damage with recipe 'own' is {value}: name the"):
        choose([fine, broken], 0.5)
    harmless = option("candidate", [value] * 4, 0.1)
    assert choose([layer("a", option("own", sure(0.3), 0), harmless)], 0.5) == {}


def test_what_siblings_share_counts_once():
    layers = [
        layer(
            name,
            option("own", sure(0.6), LayerCost(0.1, ("four bits", 0.1))),
            option("better", sure(better), LayerCost(0.1, ("eight bits", 0.3))),
        )
        for name, better in (("q", 0.0), ("k", 0.1))
    ]
    assert additional_cost(layers, {"q": layers[0].options[1]}) == pytest.approx(0.3)
    assert additional_cost(layers, {each.name: each.options[1] for each in layers}) == pytest.approx(0.2)
    assert list(choose(layers, 0.29)) == []
    assert list(choose(layers, 0.3)) == ["q", "k"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 1}, "budget = 1: expected a share"),
        ({"budget": math.nan}, "budget = nan: expected a share"),
        ({"budget": 0, "cost": "time"}, "budget = 0: expected a share of the layers' time above 0"),
        ({"budget": math.inf, "cost": "bytes"}, "budget = inf: expected a share of the layers' bytes"),
        ({"cost": "tmie"}, "unknown cost 'tmie': did you mean 'time'"),
        ({"measure": "los"}, "unknown measure 'los': did you mean 'loss'"),
        ({"recipe": recipe("bf16")}, "'bf16' quantises nothing"),
        ({"tokens": torch.zeros(100, dtype=torch.long)}, "100 tokens, 6 sequences of 16: give at least 8"),
        ({"measure": "gradient"}, "641 tokens, 40 sequences of 16: give at least 128"),
        (
            {"candidates": [recipe("fp8"), recipe({"base": "mxfp4", "name": "fp8"})]},
            "two recipes are called 'fp8': give one of them another name",
        ),
        (
            {"candidates": [recipe({"base": "mxfp4", "name": "nvfp4"})]},
            "two recipes are called 'nvfp4': give one of them another name",
        ),
        (
            {"recipe": recipe({"base": "nvfp4", "parameter_split": {"rank": 4}})},
            "'nvfp4 with own parameter_split' has parameter_split, .* not measured: set it to null",
        ),
        ({"candidates": [recipe({"base": "nvfp4", "parameter_split": {"rank": 4}})]}, "has parameter_split"),
        (
            {"recipe": recipe("mxfp4-rht")},
            r"'mxfp4-rht' quantises nothing in the forward, .*: measure the gradient, or choose another",
        ),
    ],
)
def test_mistakes_are_named(model, tokens, changes, message):
    given = {"recipe": recipe("nvfp4"), "tokens": tokens, "length": LENGTH, "budget": 0.15, **changes}
    with pytest.raises(UserError, match=message):
        plan_layers(model, given.pop("recipe"), given.pop("tokens"), **given)
    assert not bit_layers(model)


def test_a_recipe_without_a_quantised_backward_has_no_error_of_the_gradient(model, tokens):
    block = {f"q_backward_{each}": "fp32" for each in ("input", "weight", "outputgrad")}
    with pytest.raises(UserError, match=r"quantises nothing in the backward, .*: measure the loss"):
        plan_layers(
            model, recipe({"base": "nvfp4", **block}), tokens, length=LENGTH, budget=0.1, measure="gradient"
        )


def test_weights_that_give_no_finite_loss_are_refused(model, tokens):
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = math.inf
    with pytest.raises(UserError, match="not finite"):
        plan_layers(model, recipe("nvfp4"), tokens, length=LENGTH, budget=0.15)
    assert not bit_layers(model)


def test_only_damage_within_two_errors_is_marked_as_near_zero():
    layers = (layer("a", option("own", sure(0.01), 0)), layer("b", option("own", sure(-0.1), 0)))
    plan = LayerPlan(recipe("nvfp4"), layers, {}, (0.0, 0.001), 2.0, 100, "loss", "weights")
    assert ["≈ 0" in line for line in table(plan).splitlines()[1:3]] == [True, False]
    assert summary(plan, 0.1).startswith("change nothing: no option that fits")


def test_layers_that_their_own_recipe_leaves_alone_stay_so_in_the_plan(model, tokens):
    block = {"base": "nvfp4", "layers": {SENSITIVE: "mxfp4", "*.h.0.mlp": "bf16", "*.attn": "mxfp8"}}
    plan = plan_layers(model, recipe(block), tokens, length=LENGTH, budget=0.5)
    names = {each.name for each in plan.layers}
    assert SENSITIVE in plan.chosen
    assert not [name for name in names if ".h.0.mlp" in name]
    assert [pattern for pattern, _ in plan.recipe.layers] == ["*.h.0.mlp", "*.attn"]
    report = convert(model, recipe(json.loads(json.dumps(plan.recipe.to_dict()))))
    assert {each.name for each in report.swapped} == names - set(plan.chosen)


@pytest.mark.parametrize("kind", ["bytes", "time"])
def test_the_plan_of_a_llama_counts_the_bytes_or_the_time_of_all_its_layers(kind):
    model = random_model(tiny_config("llama"), seed=3).eval()
    tokens = torch.randint(0, 64, (8 * LENGTH + 1,), generator=torch.Generator().manual_seed(0))
    micro, chosen = 48, recipe({"base": "nvfp4", "keep_last": 1})
    plan = plan_layers(
        model,
        chosen,
        tokens,
        length=LENGTH,
        budget=9,
        cost=kind,
        candidates=[recipe("fp8")],
        micro_tokens=micro,
    )
    weights = sum(each.weights for each in plan.layers)
    inputs = micro * (32 + 32 + 32 + 48)  # of q, k and v; of o; of gate and up; of down
    elements = inputs + weights if kind == "bytes" else 3 * micro * weights
    four, eight = (9 / 16, 1) if kind == "bytes" else (1 / 4, 1 / 2)  # cost of an element
    better = {each.name: each.options[1] for each in plan.layers}
    assert additional_cost(plan.layers, better) == pytest.approx((eight - four) / four, rel=0.03)
    q_proj = "model.layers.0.self_attn.q_proj"
    # alone, it shares its input with no sibling any more
    alone = micro * 32 * eight + 32 * 32 * (eight - four) if kind == "bytes" else 3 * micro * 32 * 32 / 4
    found = additional_cost(plan.layers, {q_proj: better[q_proj]})
    assert found == pytest.approx(alone / (elements * four), rel=0.03)


def test_a_candidate_that_does_what_a_layer_does_already_is_not_measured_again(model, tokens):
    layers = {"*.h.0": {"base": "fp8", "if_present": True}}
    whole = recipe({"base": "nvfp4", "keep_if_present": ["*.attn", "*.c_proj"], "layers": layers})
    same, other = recipe({"base": "nvfp4", "name": "same", "keep": ["*"]}), recipe("nvidia-nvfp4")
    candidates = [same, other, other, recipe("fp8")]
    plan = plan_layers(model, whole, tokens[:129], length=LENGTH, budget=0.9, candidates=candidates)
    assert [[each.recipe.name for each in layer.options] for layer in plan.layers] == [
        ["fp8", "same", "nvidia-nvfp4"],
        [whole.name, "nvidia-nvfp4", "fp8"],
    ]
    chosen = [each.recipe for layer in plan.layers for each in layer.options]
    assert not any(each.keep or each.keep_last or each.if_present for each in chosen)


def test_the_seed_decides_about_stochastic_rounding(model, tokens):
    chosen = recipe({"base": "nvfp4", "q_forward_input": "nvfp4e2m1b", "keep_first": 1})
    found = [
        plan_layers(model, chosen, tokens[:129], length=LENGTH, budget=0.1, seed=seed) for seed in (0, 0, 1)
    ]
    first, again, other = (each.all_layers for each in found)
    assert first == again != other
