"""A precision check changes no bit of a training run, and a resumed run is the uninterrupted one."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from controlled_training import (
    GPT2_SETTINGS,
    PLAIN,
    batch,
    converted,
    gpt2,
    precisions_of,
    train,
    train_gpt2,
)

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.speculation.precisions import recipe_with


def with_dropout(recipe_of=None):
    model = converted(dropout=0.2)
    for layer in bit_layers(model).values():
        if recipe_of is not None:
            layer.recipe = recipe_with(layer.recipe, recipe_of)
    torch.manual_seed(11)
    return model


class NoController:
    """The interface of a controller, without any effect."""

    layers = ()

    def begin_step(self):
        pass

    def end_step(self):
        pass


def state_of(model):
    return {name: each.tolist() for name, each in model.state_dict().items()}


def test_with_bf16_as_the_only_candidate_training_equals_no_controller_bit_for_bit():
    plain = with_dropout(["bf16"] * 3)
    _, _, expected = train(plain, NoController(), range(8))
    numbers = torch.get_rng_state()
    model = with_dropout()
    settings = {"candidates": ["bf16"], "every": 1, "lookahead": 0, "verify_every": 1}
    controller = mlb.PrecisionController(model, {**settings, "estimator": {"sample": 64}})
    reports, _, losses = train(model, controller, range(8))
    assert losses == expected
    assert state_of(model) == state_of(plain)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(report.shares == {"bf16": 1.0} and not report.changes for report in reports)


@pytest.mark.parametrize("candidate", ["int4", "nvfp4", "int8", "mixed", "fp8"])
def test_checks_change_no_bit_at_any_candidate(candidate):
    """Layers get the largest magnitude from the probe there, and search for it themselves otherwise."""
    plain = with_dropout(["bf16"] * 3)
    _, _, expected = train(plain, NoController(), range(1))
    for layer in bit_layers(plain).values():
        chosen = [candidate] * 3 if layer.layer_name != "up" else [candidate, "bf16", candidate]
        layer.recipe = recipe_with(mlb.recipe("fp8"), chosen)
    _, _, more = train(plain, NoController(), range(1, 6))
    model = with_dropout()
    settings = {
        "candidates": [candidate, "bf16"],
        "threshold_db": 0,
        "hysteresis_db": 0,
        "every": 1,
        "lookahead": 0,
    }
    controller = mlb.PrecisionController(model, {**settings, "verify_every": 2})
    _, used, losses = train(model, controller, range(6))
    assert Counter(used[5].values()) == {candidate: 8, "bf16": 1}
    assert losses == expected + more
    assert state_of(model) == state_of(plain)


def test_steps_without_a_check_read_no_tensor():
    model = converted()
    controller = mlb.PrecisionController(model, PLAIN)
    train(model, controller, range(1))
    controller.begin_step()
    layer = model.up
    assert controller.probe("up", layer.begin_use()) is None
    assert controller.recipe("up", layer.recipe) is controller.recipe("up", layer.recipe)
    assert controller.end_step() is None


def test_detached_layers_run_with_their_own_recipes():
    model, plain = converted(), converted()
    controller = mlb.PrecisionController(model, PLAIN)
    train(model, controller, range(3), lr=0.0)
    controller.detach()
    x = batch(0)
    model.eval(), plain.eval()
    assert torch.equal(model(x), plain(x))
    assert all(layer.chooser is None for layer in bit_layers(model).values())


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    whole, half = gpt2(), gpt2()
    torch.manual_seed(9)  # of dropout
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-3)
    controller = mlb.PrecisionController(whole, GPT2_SETTINGS)
    losses, reports = train_gpt2(whole, optimizer, controller, range(30))
    assert len({each.reason for report in reports if report for each in report.changes}) >= 3  # much happens
    torch.manual_seed(9)
    optimizer = torch.optim.AdamW(half.parameters(), lr=3e-3)
    first = mlb.PrecisionController(half, GPT2_SETTINGS)
    before, _ = train_gpt2(half, optimizer, first, range(15))
    stream = next(iter(bit_layers(half).values())).random_stream
    numbers = torch.get_rng_state()
    torch.save([half.state_dict(), optimizer.state_dict(), stream.state_dict()], tmp_path / "half.pt")
    (tmp_path / "half.json").write_text(json.dumps(first.state_dict(), allow_nan=False))

    fresh = gpt2()
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=3e-3)
    second = mlb.PrecisionController(fresh, GPT2_SETTINGS)
    weights, moments, streams = torch.load(tmp_path / "half.pt")
    fresh.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    next(iter(bit_layers(fresh).values())).random_stream.load_state_dict(streams)
    second.load_state_dict(json.loads((tmp_path / "half.json").read_text()))
    torch.set_rng_state(numbers)
    assert second.step == 15
    after, later = train_gpt2(fresh, optimizer, second, range(15, 30))
    assert before + after == losses
    assert later == reports[15:]
    assert second.state_dict() == controller.state_dict()
    assert second.totals() == controller.totals()


@pytest.mark.parametrize("is_reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_activation_checkpointing_changes_nothing(is_reentrant):
    def run(is_checkpointed):
        model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
            model.enable_input_require_grads()
        controller = mlb.PrecisionController(model, GPT2_SETTINGS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, reports = train_gpt2(model, optimizer, controller, range(8))
        return losses, [dataclasses.asdict(report) for report in reports if report is not None]

    losses, reports = run(is_checkpointed=True)
    expected_losses, expected = run(is_checkpointed=False)
    assert losses == expected_losses
    assert reports == expected
    assert len(expected[0]["rows"]) == 2 * 4 * 3


def test_a_state_is_plain_json_and_comes_back_equal():
    model = converted()
    controller = mlb.PrecisionController(model, {**PLAIN, "verify_every": 1})
    train(model, controller, range(12))
    state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
    other = mlb.PrecisionController(converted(), {**PLAIN, "verify_every": 1})
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.totals() == controller.totals()
    assert precisions_of(other) == precisions_of(controller)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["layers"].pop("down"), "it lacks 'down'"),
        (lambda state: state["layers"].update(more=state["layers"]["up"]), "it has 'more'"),
        (lambda state: state.pop("totals"), "not readable"),
        (lambda state: state.pop("look_at"), "not readable"),
        (lambda state: state.update(has_run=[["a"]]), "not readable"),
        (lambda state: state.update(step="abc"), "not readable .*step = 'abc'"),
        (lambda state: state.update(step=-5), "not readable .*step = -5"),
        (lambda state: state.update(looks=1.5), "not readable .*looks = 1.5"),
        (lambda state: state["totals"]["sums"].update(hits="many"), "not readable .*hits"),
        (lambda state: state["layers"]["up"].pop("output"), "not readable"),
        (lambda state: state.update(layers=None), "not readable"),
        (lambda state: state["layers"]["up"]["output"].pop("streak"), "streak"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_in_one_line(change, message):
    controller = mlb.PrecisionController(converted(), PLAIN)
    state = controller.state_dict()
    change(state)
    with pytest.raises(UserError, match=message) as caught:
        controller.load_state_dict(state)
    assert "\n" not in str(caught.value)


def test_a_model_has_one_controller_at_a_time():
    model = converted()
    first = mlb.PrecisionController(model, PLAIN)
    with pytest.raises(UserError, match=r"already has a controller \(layer\.chooser\): call its detach"):
        mlb.PrecisionController(model, PLAIN)
    first.detach()
    second = mlb.PrecisionController(model, PLAIN)
    first.detach()  # no longer its business
    train(model, second, range(2))
    assert second.precision("up", "output") == "int8"
    with pytest.raises(UserError, match="was detached from its model: create a new"):
        first.begin_step()


def test_asking_for_the_precision_of_an_unknown_product_is_rejected():
    controller = mlb.PrecisionController(converted(), PLAIN)
    with pytest.raises(UserError, match=r"unknown layer 'upp'.*'up'"):
        controller.precision("upp", "output")
    with pytest.raises(UserError, match=r"unknown product 'outputs'.*'output'"):
        controller.precision("up", "outputs")


def test_a_controller_accepts_the_former_key_and_its_state_keeps_it():
    controller = mlb.PrecisionController(converted(), {"ladder": ["int8", "bf16"]})
    assert controller.settings.candidates == ("int8", "bf16")
    state = controller.state_dict()
    assert state["layers"]["up"]["output"]["ladder"] == ["int8", "bf16"]
    again = mlb.PrecisionController(converted(), {"candidates": ["int8", "bf16"]})
    again.load_state_dict(state)
    assert again.state_dict() == state


def test_a_state_with_other_candidates_is_rejected():
    state = mlb.PrecisionController(converted(), PLAIN).state_dict()
    other = mlb.PrecisionController(converted(), {**PLAIN, "candidates": ["fp8", "bf16"]})
    with pytest.raises(UserError, match=r"int8, bf16.*fp8, bf16"):
        other.load_state_dict(state)
