"""Repeated initialisations against ordinary ones: every bit, in any order of access."""

import pytest
import torch
from tiny_models import KINDS, tiny_config

from megalowbit.hf.model import random_model
from megalowbit.hf.start.recorded_init import record_initialization


def recorded(config, seed=7):
    return record_initialization(lambda: random_model(config, seed=seed), seed=seed)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_an_ordinary_model_in_any_order(kind, tied):
    config = tiny_config(kind, tie_word_embeddings=tied, pad_token_id=3)
    expected = random_model(config, seed=7)
    values = dict(expected.named_parameters())
    before = torch.random.get_rng_state()
    model, weights = recorded(config)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in model.parameters())
    for (name, buffer), (same, value) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert name == same
        assert torch.equal(buffer, value)
    assert set(weights) == values.keys()
    assert len(weights) == len(values)
    for order in (list(weights), list(values)[::-1], sorted(values)):
        assert all(torch.equal(weights[name], values[name]) for name in order)
    _, fresh = recorded(config)
    assert all(torch.equal(fresh[name], values[name]) for name in reversed(list(values)))


def test_each_draw_is_made_once_in_the_order_of_iteration():
    _, weights = recorded(tiny_config("gpt2"))
    drawn = []
    draw = weights._draw
    weights._draw = lambda place, memory: (drawn.append(place), draw(place, memory))
    for name in weights:
        weights[name]
    assert drawn == sorted(set(drawn))
    assert len(drawn) > 10


class Odd(torch.nn.Module):
    """Draws in parts, with other draws between, and scales a view."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.full((4, 6), 3.0))
        self.second = torch.nn.Parameter(torch.empty(5, 20))
        self.kept = torch.nn.Parameter(torch.arange(6.0))
        self.register_buffer("table", torch.arange(3.0))
        with torch.no_grad():
            self.first[1:3].normal_()
            self.second.uniform_(-1, 1)
            self.first[:, 2].uniform_(2, 3)
            torch.nn.init.normal_(self.second[2:])
            self.first.mul_(2)
            self.kept[2:4].add_(torch.tensor([10.0, 20.0]))


def test_parts_of_parameters_are_repeated():
    torch.manual_seed(5)
    expected = Odd()
    _, weights = record_initialization(Odd, seed=5)
    for name in ("second", "first", "kept", "second"):
        assert torch.equal(weights[name], expected.get_parameter(name)), name


class FromAnother(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.empty(3))
        self.second = torch.nn.Parameter(torch.empty(3))
        with torch.no_grad():
            self.second.copy_(self.first)


class RandomBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.empty(3).normal_())


class Truncated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(3))
        torch.nn.init.trunc_normal_(self.weight)


@pytest.mark.parametrize("kind", [FromAnother, RandomBuffer, Truncated])
def test_what_cannot_be_repeated_is_refused(kind):
    with pytest.raises(RuntimeError, match=r"it is not repeated$"):
        record_initialization(kind, seed=0)
    parameter = torch.nn.Linear(2, 2).weight  # the recording has ended
    assert not parameter.is_meta
