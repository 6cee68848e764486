import copy

import pytest
import torch
from torch import nn

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.carried_state import (
    OWN_ROLES,
    SHARED_ROLES,
    continue_stream,
    continue_streams,
    draws_numbers,
    has_splits,
    load_split_state_dict,
    split_counts,
    split_state_dict,
    stream_states,
)
from megalowbit.layers.conversion.convert import bit_layers, cache_weights, convert, random_stream

RECIPE = {
    "base": "nvfp4",
    "split_input": {"rank": 3},
    "split_weight": {"rank": 2},
    "split_grad_output": {"rank": 4, "refresh_every": 2},
}
NEAREST = {"base": "nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr"}


def converted(recipe=RECIPE):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    convert(model, recipe, seed=3)
    return model


def train(model, steps):
    """Gradients of further micro-batches."""
    gradients = []
    for _ in range(steps):
        step = random_stream(model).step
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x).square().sum().backward()
        gradients += [each.grad.clone() for each in model.parameters() if each.grad is not None]
    return gradients


@pytest.mark.parametrize(
    ("recipe", "draws"),
    [
        ("bf16", False),
        ("nvfp4", True),  # output gradients
        (NEAREST, False),
        ({**NEAREST, "split_input": {"method": "mean"}}, False),
        ({**NEAREST, "split_weight": {"rank": 2}}, True),
    ],
)
def test_stochastic_rounding_and_low_rank_splits_depend_on_the_stream(recipe, draws):
    assert draws_numbers(converted(recipe)) is draws
    results = []
    for step in (3, 8):  # the same data at two positions of the stream
        model = converted(recipe)
        if draws:
            random_stream(model).load_state_dict({"seed": 3, "step": step})
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        model(x).square().sum().backward()
        results.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
    assert torch.equal(*results) is not draws


def test_a_model_with_restored_states_continues_bit_for_bit():
    model = converted()
    train(model, 3)
    again = converted()
    again.load_state_dict(model.state_dict())
    random_stream(again).load_state_dict(random_stream(model).state_dict())
    load_split_state_dict(again, split_state_dict(model))
    assert split_counts(again) == split_counts(model)
    assert all(map(torch.equal, train(again, 3), train(model, 3)))


def test_without_its_states_a_model_continues_differently():
    model = converted()
    train(model, 3)
    again = converted()
    random_stream(again).load_state_dict(random_stream(model).state_dict())
    assert not all(map(torch.equal, train(again, 1), train(model, 1)))


def test_a_layers_own_stream_continues_before_its_first_use_without_drawing_a_seed():
    torch.manual_seed(0)
    net = nn.Sequential(BitLinear(32, 32, recipe="nvfp4"))
    assert stream_states(net) == {}
    net(torch.randn(2, 32))
    saved, x = stream_states(net), torch.randn(16, 32, requires_grad=True)
    expected = torch.autograd.grad(net(x).square().sum(), x)[0]
    other = nn.Sequential(BitLinear(32, 32, recipe="nvfp4"))
    other.load_state_dict(net.state_dict())
    assert continue_streams(other, saved) == []
    position = torch.get_rng_state()
    assert torch.equal(torch.autograd.grad(other(x).square().sum(), x)[0], expected)
    assert torch.equal(torch.get_rng_state(), position)


def test_streams_that_were_not_saved_are_named():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32)) for _ in range(3)])
    for seed, (part, recipe) in enumerate(zip(net, ("nvfp4", "nvfp4", "fp8"), strict=True)):
        convert(part, recipe, seed=seed)
    assert continue_stream(net, {"seed": 0, "step": 2}) == ["1.0"]  # fp8 rounds to nearest
    assert continue_streams(net, {"1.0": {"seed": 1, "step": 2}}) == ["0.0"]
    assert [state["step"] for state in stream_states(net).values()] == [2, 2, 0]
    with pytest.raises(UserError, match="states of random streams are 3"):
        continue_streams(net, 3)


def test_states_survive_a_file(tmp_path):
    model = converted()
    train(model, 2)
    torch.save(split_state_dict(model), tmp_path / "rank_00000.pt")
    saved = torch.load(tmp_path / "rank_00000.pt", weights_only=True)
    again = copy.deepcopy(model)
    load_split_state_dict(again, saved)
    assert all(map(torch.equal, train(again, 2), train(model, 2)))


def test_evaluation_does_not_change_the_states():
    model, quiet = converted(), converted()
    train(model, 2), train(quiet, 2)
    model.eval()
    model(torch.randn(8, 32))
    model.train()
    assert all(map(torch.equal, train(model, 2), train(quiet, 2)))


def test_factors_are_found_cold_once_and_warm_from_then_on():
    model = converted()
    train(model, 4)
    counts = split_counts(model)
    assert counts["cold"] == 2 * 3  # layers × operands
    assert counts["reused"] == 2 * 2  # output gradients, every other micro-batch
    assert counts["warm"] == 2 * (3 + 3 + 1)


@pytest.mark.parametrize(
    ("every", "refreshed_at"),
    [(3, [1, 5, 9, 13, 17]), (4, [1, 5, 9, 13, 17]), (5, [1, 1, 9, 9, 17]), (12, [1, 1, 1, 13, 13])],
)
def test_cached_weights_are_factored_once_per_step(every, refreshed_at):
    model = converted({"base": "nvfp4", "split_weight": {"rank": 2, "refresh_every": every}})
    cache, seen = cache_weights(model), []
    for _ in range(5):
        train(model, 4)  # micro-batches of one optimizer step
        cache.clear()
        states = [layers["weight"] for layers in split_state_dict(model).values()]
        assert len({state["refreshed_at"] for state in states}) == 1
        seen.append(states[0]["refreshed_at"])
    assert seen == refreshed_at
    counts = split_counts(model)
    assert counts["cold"] == 2
    assert counts["cold"] + counts["warm"] == 2 * len(set(refreshed_at))
    assert counts["cold"] + counts["warm"] + counts["reused"] == 2 * 5  # once a step


def test_weights_continue_equally_on_a_rank_that_was_added():
    model = converted()
    train(model, 3)
    shared, own = split_state_dict(model, SHARED_ROLES), split_state_dict(model, OWN_ROLES)
    assert {role for states in shared.values() for role in states} == {"weight"}
    assert {role for states in own.values() for role in states} == {"input", "grad_output"}
    old, new = converted(), converted()
    for each in (old, new):
        random_stream(each).load_state_dict(random_stream(model).state_dict())
        load_split_state_dict(each, shared, SHARED_ROLES)
    load_split_state_dict(old, own, OWN_ROLES)
    for each in (old, new):
        train(each, 1)
    for one, other in zip(bit_layers(old).values(), bit_layers(new).values(), strict=True):
        weights = [layer.split_states["weight"].state_dict() for layer in (one, other)]
        assert torch.equal(weights[0]["directions"], weights[1]["directions"])
        counts = [layer.split_states["weight"].counts for layer in (one, other)]
        assert [(each["cold"], each["warm"]) for each in counts] == [(1, 3), (1, 3)]
        counts = [layer.split_states["input"].counts for layer in (one, other)]
        assert [(each["cold"], each["warm"]) for each in counts] == [(1, 3), (1, 0)]
    with pytest.raises(UserError, match="not a layer of this model"):
        load_split_state_dict(new, own, SHARED_ROLES)


def test_loading_states_of_some_operands_leaves_others_unchanged():
    model = converted()
    train(model, 2)
    before = split_state_dict(model, OWN_ROLES)
    load_split_state_dict(model, {}, SHARED_ROLES)
    assert split_state_dict(model, SHARED_ROLES) == {}
    after = split_state_dict(model, OWN_ROLES)
    for name, states in before.items():
        for role, state in states.items():
            assert torch.equal(state["directions"], after[name][role]["directions"])


@pytest.mark.parametrize("is_split", [True, False])
def test_output_gradients_stay_warm_when_loading_splits_or_merges_weights(is_split):
    block = {**RECIPE, "split_weight": None, "parameter_split": {"rank": 2}}
    model, other = converted(block), converted(block)
    for layer in bit_layers(model if not is_split else other).values():
        for name in ("split_u", "split_s", "split_v"):
            torch.nn.init.ones_(getattr(layer, name))
        layer.is_split = True
    train(model, 2)
    model.load_state_dict(other.state_dict())
    assert {layer.is_split for layer in bit_layers(model).values()} == {is_split}
    train(model, 2)
    for layer in bit_layers(model).values():
        counts = {role: state.counts for role, state in layer.split_states.items()}
        assert [counts[role]["cold"] for role in ("input", "grad_output")] == [1, 1]
        assert [each["misfit"] for each in counts.values()] == [0, 0]


def test_directions_from_a_checkpoint_with_wider_gradients_start_cold():
    block = {**RECIPE, "split_weight": None, "parameter_split": {"rank": 2}}
    model = converted(block)
    train(model, 2)
    saved = split_state_dict(model, OWN_ROLES)
    for states in saved.values():  # as they were where V stood below W_R in one product
        directions = states["grad_output"]["directions"]
        states["grad_output"]["directions"] = torch.cat([directions, directions[:, :2]], dim=1)
    load_split_state_dict(model, saved, OWN_ROLES)
    before = split_counts(model)
    train(model, 1)
    after = split_counts(model)
    assert after["misfit"] - before["misfit"] == len(saved)


def test_split_states_are_stored_by_operand():
    weights = converted({"base": "nvfp4", "split_weight": {"rank": 2}})
    assert has_splits(weights)
    assert has_splits(weights, SHARED_ROLES)
    assert not has_splits(weights, OWN_ROLES)


def test_a_model_without_splits_has_no_state():
    model = converted("nvfp4")
    train(model, 1)
    assert not has_splits(model)
    assert has_splits(converted())
    assert split_state_dict(model) == {}
    assert split_counts(model) == {}


@pytest.mark.parametrize("saved", [{"3": {}}, {"0": 5}, {"0": {"outputs": {}}}])
def test_states_of_another_model_are_rejected(saved):
    with pytest.raises(UserError, match="not a layer of this model"):
        load_split_state_dict(converted(), saved)
