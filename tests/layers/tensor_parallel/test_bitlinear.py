"""Low-bit layers on shards, in a group of one rank; more ranks are in tests/distributed."""

import pytest
import torch
import torch.distributed as dist

from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.engine.process_start import start_process_group
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import convert, plain_state_dict, restore
from megalowbit.layers.state_dict_layout import parameter_layout
from megalowbit.layers.tensor_parallel.bitlinear import ColumnParallelBitLinear, RowParallelBitLinear
from megalowbit.layers.tensor_parallel.linear import parallel_linear


@pytest.fixture
def model():
    start_process_group()
    group = TensorGroup(dist.group.WORLD)
    torch.manual_seed(0)
    first, second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
    return torch.nn.Sequential(
        parallel_linear(first.weight, first.bias, group, is_row=False, parts=(64,), is_transposed=True),
        parallel_linear(second.weight, second.bias, group, is_row=True, parts=(64,)),
    )


def test_conversion_keeps_parameters_and_kinds_and_restoring_undoes_it(model):
    weights = [layer.weight for layer in model]
    kinds = [type(layer) for layer in model]
    convert(model, "nvfp4")
    assert [type(layer) for layer in model] == [ColumnParallelBitLinear, RowParallelBitLinear]
    assert all(layer.weight is weight for layer, weight in zip(model, weights, strict=True))
    restore(model)
    assert [type(layer) for layer in model] == kinds
    assert [layer.is_transposed for layer in model] == [True, False]
    assert model(torch.randn(2, 32)).shape == (2, 32)


def test_one_rank_computes_what_a_plain_low_bit_layer_does(model):
    recipe = {"base": "nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr"}
    convert(model, recipe)
    for layer in model:
        single = BitLinear(layer.in_features, layer.out_features, recipe=recipe)
        with parameter_layout(layer):
            single.load_state_dict(layer.state_dict())
        x = torch.randn(16, layer.in_features)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        assert torch.equal(layer(mine), single(theirs))
        layer(mine).square().sum().backward()
        single(theirs).square().sum().backward()
        assert torch.equal(mine.grad, theirs.grad)


def test_a_plain_state_dict_has_conv1d_weights_the_way_transformers_has_them(model):
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    expected["0.weight"] = (32, 64)
    assert {name: tuple(value.shape) for name, value in plain_state_dict(model).items()} == expected
    convert(model, "nvfp4")
    assert {name: tuple(value.shape) for name, value in plain_state_dict(model).items()} == expected
