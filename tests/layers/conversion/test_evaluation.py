"""Evaluations repeat whatever happened before, and leave no trace in the layers."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import SLOTS
from megalowbit.layers.conversion.carried_state import split_state_dict
from megalowbit.layers.conversion.convert import (
    bit_layers,
    cache_weights,
    convert,
    product_counts,
    random_stream,
)
from megalowbit.layers.conversion.evaluation import evaluation
from megalowbit.layers.recipe import recipe

STOCHASTIC = {"base": "nvfp4", "q_forward_input": "nvfp4e2m1b", "q_forward_weight": "nvfp4e2m1b"}
SPLIT = {"base": "nvfp4", "split_input": {"rank": 2}, "split_weight": {"rank": 2}}
RECIPES = {"nearest": "nvfp4", "stochastic": STOCHASTIC, "split": SPLIT, "metis": "metis-nvfp4"}


class Plain:
    """A chooser that lets every layer run in bf16."""

    def recipe(self, layer, base):
        return recipe({"base": "nvfp4", "q_forward_input": "fp32", "q_forward_weight": "fp32"})

    def probe(self, layer, use):
        return None


def model_of(kind, rank=0):
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.5), nn.Linear(96, 64), nn.Linear(64, 64)
    model = nn.Sequential(*layers).bfloat16()
    convert(model, RECIPES[kind], seed=3, rank=rank)
    model[2].eval()  # by the user
    return model


def inputs(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(32, 64, generator=generator).bfloat16() for _ in range(count)]


def train(model, batches):
    for batch in batches:
        model(batch).float().square().mean().backward()


def evaluate(model, numbers, **options):
    batches = inputs(4, seed=1)
    with evaluation(model, numbers, **options):
        return {number: model(batches[number]) for number in numbers}


def plain(value):
    return value.float().tolist() if isinstance(value, torch.Tensor) else value


def state_of(model):
    """All that training depends on, copied."""
    stream = random_stream(model)
    return {
        "stream": (stream.state_dict(), stream.given_rank),
        "splits": tree_map(plain, split_state_dict(model)),
        "counts": product_counts(model),
        "modes": [module.training for module in model.modules()],
        "generator": torch.get_rng_state().tolist(),
        "slots": {
            name: {slot: id(layer.__dict__[slot]) for slot in SLOTS}
            for name, layer in bit_layers(model).items()
        },
        "keys": [sorted(layer.__dict__) for layer in bit_layers(model).values()],
        "uses": [dict(layer._uses.__dict__) for layer in bit_layers(model).values()],
        "hooks": len(model._forward_pre_hooks),
    }


@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize("kind", RECIPES)
def test_training_continues_with_the_same_bits(kind, is_quantized):
    results = []
    for is_evaluated in (True, False):
        model = model_of(kind)
        cache = cache_weights(model)
        train(model, inputs(2))
        before = state_of(model)
        held = len(cache)
        if is_evaluated:
            evaluate(model, range(4), is_quantized=is_quantized)
            assert state_of(model) == before
            assert len(cache) == held
        train(model, inputs(2, seed=5))
        results.append([parameter.grad for parameter in model.parameters()])
        assert model.training
        assert not model[2].training
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("kind", RECIPES)
def test_a_batch_depends_on_its_number_and_nothing_else(kind):
    """Not on the steps before, the rank, other batches, or the cache."""
    fresh, used = model_of(kind), model_of(kind, rank=5)
    train(used, inputs(3))
    expected = evaluate(fresh, range(4))
    for numbers in ([0, 1, 2, 3], [3, 1], [2]):
        for keeps_weights in (True, False):
            found = evaluate(used, numbers, keeps_weights=keeps_weights)
            assert all(torch.equal(found[number], expected[number]) for number in numbers)
    assert not any(output.requires_grad for output in expected.values())


def test_batches_round_with_different_numbers():
    model, batch = model_of("stochastic"), inputs(1)[0]
    with evaluation(model, [0, 1]):
        assert not torch.equal(model(batch), model(batch))


@pytest.mark.parametrize("kind", RECIPES)
def test_unquantised_layers_give_what_plain_ones_do(kind):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.5), nn.Linear(96, 64), nn.Linear(64, 64))
    plain = plain.bfloat16().eval()
    model = model_of(kind)
    train(model, inputs(1))
    found, quantized = (evaluate(model, range(4), is_quantized=each) for each in (False, True))
    for number, batch in enumerate(inputs(4, seed=1)):
        with torch.no_grad():
            assert torch.equal(found[number], plain(batch))
        assert not torch.equal(quantized[number], found[number])


def test_a_chooser_decides_the_precision_unless_nothing_is_quantised():
    model = model_of("nearest")
    own = evaluate(model, range(4))
    for layer in bit_layers(model).values():
        layer.chooser = Plain()
    chosen, plain = evaluate(model, range(4)), evaluate(model, range(4), is_quantized=False)
    assert all(torch.equal(chosen[number], plain[number]) for number in range(4))
    assert not torch.equal(own[0], chosen[0])
    assert all(isinstance(layer.chooser, Plain) for layer in bit_layers(model).values())


def test_an_error_in_between_restores_everything():
    model = model_of("split")
    train(model, inputs(2))
    before = state_of(model)
    with (
        pytest.raises(UserError, match="expects a last axis of 64"),
        evaluation(model, range(4), is_quantized=False),
    ):
        model(torch.ones(2, 63))
    assert state_of(model) == before


def test_a_model_without_low_bit_layers_only_changes_its_mode():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    batch = torch.ones(2, 8)
    with evaluation(model, [0, 1]):
        assert torch.equal(model(batch), model(batch))
    assert model.training
    assert not model._forward_pre_hooks
