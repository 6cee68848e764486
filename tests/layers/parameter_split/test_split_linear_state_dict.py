"""A split weight is whole in a state dict, and goes on bitwise from it."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from megalowbit.layers.conversion.convert import bit_layers, convert, plain_state_dict
from megalowbit.layers.parameter_split.split_linear import RESIDUAL, SPLIT_NAMES
from megalowbit.layers.state_dict_layout import parameter_layout
from megalowbit.spectral.weight_split import weight_parts

SPLIT = {"base": "nvfp4", "parameter_split": {"rank": 3}}
IDS = torch.arange(32).view(2, 16)
KINDS = pytest.mark.parametrize("kind", ["linear", "conv1d"])


def make(kind="conv1d", *, is_split=True, seed=0, recipe=SPLIT, dtype=torch.float32):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16) if kind == "linear" else Conv1D(16, 16)).to(dtype)
    convert(model, recipe)
    return split(model) if is_split else model


def split(model):
    for layer in bit_layers(model).values():
        with torch.no_grad():
            new = weight_parts(layer.weight.detach().float(), 3)
            for name, value in zip(("weight", *SPLIT_NAMES), new, strict=True):
                getattr(layer, name).copy_(value)
        layer.is_split = True
    return model


def whole(layer):
    """The weight by a sum of outer products, in float64, as the layer's kind has it."""
    u, s, v = (getattr(layer, name).detach().double() for name in SPLIT_NAMES)
    total = layer.weight.detach().double() + sum(s[k] * torch.outer(u[:, k], v[k]) for k in range(len(s)))
    return total.t() if layer.is_transposed else total


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_weight_is_in_the_state_dict_and_the_parts_beside_it(kind, dtype):
    model = make(kind, dtype=dtype)
    state = model.state_dict()
    assert set(state) == {f"0.{name}" for name in ("weight", "bias", *SPLIT_NAMES, RESIDUAL)}
    torch.testing.assert_close(state["0.weight"].double(), whole(model[0]), rtol=2 * 2**-8, atol=1e-6)
    assert state["0.weight"].dtype == dtype
    assert torch.equal(state[f"0.{RESIDUAL}"], model[0].weight)
    other = make(kind, seed=1, is_split=False, dtype=dtype)
    other.load_state_dict(state)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert other[0].is_split


@KINDS
@pytest.mark.parametrize("options", [{"assign": True}, {"strict": False}])
def test_a_split_model_goes_on_bitwise_from_its_state_dict(kind, options):
    model, other = make(kind), make(kind, seed=1)
    other.load_state_dict(copy.deepcopy(model.state_dict()), **options)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert all(parameter.is_contiguous() for parameter in other.parameters())
    x = torch.randn(4, 16)
    assert torch.equal(other.eval()(x), model.eval()(x))


@KINDS
def test_the_form_of_checkpoints_is_loaded_as_well(kind):
    """`weight` is the residual there; a program may have saved it so before state dicts had it whole."""
    model, other = make(kind), make(kind, seed=1)
    state = model.state_dict()
    residual = state.pop(f"0.{RESIDUAL}")
    state["0.weight"] = residual.t() if kind == "conv1d" else residual
    other.load_state_dict(state)
    assert all(map(torch.equal, other.parameters(), model.parameters()))


@KINDS
def test_the_whole_weight_alone_is_loaded_unsplit(kind):
    model, other = make(kind), make(kind, seed=1)
    state = {name: value for name, value in model.state_dict().items() if "split" not in name}
    other.load_state_dict(state)
    assert not other[0].is_split
    assert torch.equal(other[0].merged_weight(), model[0].merged_weight())
    plain = nn.Sequential(nn.Linear(16, 16) if kind == "linear" else Conv1D(16, 16))
    plain.load_state_dict(state)


@KINDS
def test_parts_of_another_weight_than_the_one_beside_them_are_refused(kind):
    """As when all entries of two state dicts were averaged: the product of means is no mean of products."""
    first, second = make(kind).state_dict(), make(kind, seed=1).state_dict()
    state = {name: (value + second[name]) / 2 for name, value in first.items()}
    with pytest.raises(RuntimeError, match=r"0\.weight and the parts it was split into .*are different"):
        make(kind).load_state_dict(state)
    alone = {name: value for name, value in state.items() if "split" not in name}
    make(kind).load_state_dict(alone)


@KINDS
def test_parts_that_were_rounded_on_the_way_still_fit(kind):
    model, other = make(kind), make(kind, seed=1)
    other.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()})
    assert other[0].is_split


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@KINDS
def test_an_edit_of_a_twentieth_is_no_rounding(kind, dtype):
    state = make(kind).to(dtype).state_dict()
    make(kind).load_state_dict(state)
    state["0.weight"] = state["0.weight"] * 1.05
    with pytest.raises(RuntimeError, match=r"are different weights"):
        make(kind).load_state_dict(state)


def test_weights_that_are_not_finite_are_not_mistaken_for_others():
    model = make()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    make(seed=1).load_state_dict(model.state_dict())


def test_a_residual_without_factors_is_half_of_a_split():
    state = make().state_dict()
    del state["0.split_u"]
    with pytest.raises(RuntimeError, match=r"split_residual, .* without 0\.split_u is an incomplete split"):
        make().load_state_dict(state, strict=False)


def test_what_is_left_of_a_split_is_refused_by_a_layer_without_factors():
    source, target = make(), make(recipe="nvfp4", is_split=False)
    with parameter_layout(source):
        state = copy.deepcopy(source.state_dict())
        state["0.weight"] = state["0.weight"].t()
    with pytest.raises(RuntimeError, match=r"0\.weight is the residual of a split weight"):
        target.load_state_dict(state, strict=False)
    found = target.load_state_dict(source.state_dict(), strict=False)  # whole there
    assert {name.rpartition(".")[2] for name in found.unexpected_keys} == {*SPLIT_NAMES, RESIDUAL}
    assert torch.equal(target[0].weight, source[0].merged_weight())
    unsplit = make(is_split=False, seed=1)
    target.load_state_dict(unsplit.state_dict(), strict=False)
    assert torch.equal(target[0].weight, unsplit[0].weight)


@KINDS
def test_variables_that_are_kept_are_the_parts(kind):
    model = make(kind)
    state = model.state_dict(keep_vars=True)
    assert state[f"0.{RESIDUAL}"] is model[0].weight
    assert state["0.split_u"] is model[0].split_u
    assert not state["0.weight"].requires_grad  # it is computed


def test_inside_parameter_layout_weight_is_what_is_left():
    model, other = make(), make(seed=1)
    with parameter_layout(model), parameter_layout(other):
        assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
        other.load_state_dict(model.state_dict())
    assert all(map(torch.equal, other.parameters(), model.parameters()))


@pytest.mark.parametrize("device", ["meta"])
def test_a_split_model_without_data_is_filled_by_assignment(device):
    with torch.device(device):
        empty = make(is_split=False)
    empty.load_state_dict(make().state_dict(), assign=True)
    assert empty[0].is_split
    assert torch.equal(empty[0].merged_weight(), make()[0].merged_weight())


def test_from_pretrained_of_a_split_model_finds_whole_weights(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    expected = model(IDS).logits
    convert(model, SPLIT)
    split(model)
    model.save_pretrained(tmp_path)
    again, report = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    torch.testing.assert_close(again.eval()(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in plain_state_dict(model).items()
    )
