"""In evaluation mode, layers with splits repeat their results and leave the state of training alone."""

import pytest
import torch

import megalowbit as mlb


def kept(layer):
    """The state of each split, as plain values."""
    states = {role: state.state_dict() for role, state in layer.split_states.items()}
    return {
        role: {
            name: each.tolist() if isinstance(each, torch.Tensor) else each for name, each in found.items()
        }
        for role, found in states.items()
    }


@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.parametrize(
    "recipe",
    [
        "metis-qb",
        {"base": "nvfp4", "split_input": {"rank": 4}},
        {"base": "nvfp4", "split_weight": {"rank": 4, "method": "svd_lowrank"}},
        {"base": "nvfp4", "split_input": {"rank": 4, "method": "channels"}},
    ],
)
def test_forwards_of_one_input_are_equal_in_evaluation_mode(recipe, trained):
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64)), torch.randn(32, 64)
    mlb.convert(model, recipe=recipe)
    for _ in range(trained):
        model(x).sum().backward()
    before = kept(model[0])
    model.eval()
    with torch.no_grad():
        results = [model(x) for _ in range(3)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], torch.nn.functional.linear(x, model[0].weight, model[0].bias))
    assert {role: each for role, each in kept(model[0]).items() if role in before} == before
