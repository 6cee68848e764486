import copy

import pytest
import torch
from torch import nn

from megalowbit.errors import UserError
from megalowbit.layers.split_states import has_splits, load_split_state_dict, split_counts, split_state_dict
from megalowbit.layers.surgery import convert, random_stream

RECIPE = {
    "base": "nvfp4",
    "split_input": {"rank": 3},
    "split_weight": {"rank": 2},
    "split_grad_output": {"rank": 4, "refresh_every": 2},
}


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
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
    return gradients


def test_a_model_with_its_states_back_goes_on_bit_for_bit():
    model = converted()
    train(model, 3)
    again = converted()
    again.load_state_dict(model.state_dict())
    random_stream(again).load_state_dict(random_stream(model).state_dict())
    load_split_state_dict(again, split_state_dict(model))
    assert all(map(torch.equal, train(again, 3), train(model, 3)))


def test_without_its_states_it_would_not():
    model = converted()
    train(model, 3)
    again = converted()
    random_stream(again).load_state_dict(random_stream(model).state_dict())
    assert not all(map(torch.equal, train(again, 1), train(model, 1)))


def test_states_survive_a_file(tmp_path):
    model = converted()
    train(model, 2)
    torch.save(split_state_dict(model), tmp_path / "rank_00000.pt")
    saved = torch.load(tmp_path / "rank_00000.pt", weights_only=True)
    again = copy.deepcopy(model)
    load_split_state_dict(again, saved)
    assert all(map(torch.equal, train(again, 2), train(model, 2)))


def test_evaluation_leaves_no_trace():
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


def test_a_model_without_splits_has_no_state():
    model = converted("nvfp4")
    train(model, 1)
    assert not has_splits(model)
    assert has_splits(converted())
    assert split_state_dict(model) == {}
    assert split_counts(model) == {}


@pytest.mark.parametrize("saved", [{"3": {}}, {"0": 5}, {"0": {"outputs": {}}}])
def test_states_of_another_model_are_refused(saved):
    with pytest.raises(UserError, match="no layer of this model"):
        load_split_state_dict(converted(), saved)
