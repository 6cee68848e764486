"""Derivatives of a low-bit layer's gradients are an error; autograd would else take them for 0.

`nn.Linear` shows that the quantities are not 0. Layers run eagerly, and as operators for compiled models.
"""

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jvp
from torch.utils.checkpoint import checkpoint

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers import compiled

ERROR = r"^second derivatives of .* are not defined \(create_graph=True\): use mlb.restore on the model, .*$"
NEAREST = {"base": "nvfp4", "name": "nearest", "q_backward_outputgrad": "nvfp4e2m1bnosr"}


class AsOperator(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        layer = self.layer
        return compiled.compiled_linear(layer, x, layer.weight, layer.bias, None, x.dtype)


def layer_of(kind):
    torch.manual_seed(0)
    if kind == "nn.Linear":
        return nn.Linear(32, 16)
    layer = mlb.BitLinear(32, 16, recipe=NEAREST)
    return AsOperator(layer) if kind == "operator" else layer


def x_of():
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


def by_jvp(layer):
    return jvp(layer, x_of(), torch.ones(8, 32))[1]


def by_hessian(layer):
    return hessian(lambda x: layer(x).square().sum(), x_of())


def by_penalty(layer):
    x = x_of().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    return x.grad


def by_penalty_in_a_loss(layer):
    """The output's gradient is a constant, so that grad_input depends on the weight only."""
    x = x_of().requires_grad_()
    loss = layer(x).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()
    return next(layer.parameters()).grad


def by_penalty_on_a_weight(layer):
    """As before; in addition, autograd looks for a path to the weight only."""
    x, weight = x_of().requires_grad_(), next(layer.parameters())
    loss = layer(x).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(loss + grad.square().sum(), weight)[0]


def by_gradient_of_the_weight(layer):
    """The input was computed, so it is not a leaf."""
    x, weight = x_of().requires_grad_(), next(layer.parameters())
    (grad,) = torch.autograd.grad(layer(x * 2).sum(), weight, create_graph=True)
    (x.sum() + grad.square().sum()).backward()
    return x.grad


def by_named_inputs(layer):
    """As before; the second backward goes to the input's origin only, which no leaf of the node is."""
    x, weight = x_of().requires_grad_(), next(layer.parameters())
    (grad,) = torch.autograd.grad(layer(x * 2).sum(), weight, create_graph=True)
    return torch.autograd.grad(x.sum() + grad.square().sum(), x)[0] - 1


WAYS = (
    by_jvp,
    by_hessian,
    by_penalty,
    by_penalty_in_a_loss,
    by_penalty_on_a_weight,
    by_gradient_of_the_weight,
    by_named_inputs,
)


@pytest.mark.parametrize("kind", ["eager", "operator"])
@pytest.mark.parametrize("way", WAYS)
def test_a_second_derivative_is_an_error(kind, way):
    assert way(layer_of("nn.Linear")).any()
    with pytest.raises(UserError, match=ERROR):
        way(layer_of(kind))


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way, marks=pytest.mark.xfail(strict=True, reason="documented: compiled layers keep codes")
        )
        if way in (by_penalty_on_a_weight, by_named_inputs)
        else way
        for way in WAYS
    ],
)
def test_in_a_compiled_layer_most_are_torchs_error(way):
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        way(torch.compile(layer_of("eager"), backend="aot_eager"))


def test_a_graph_of_gradients_is_an_error_before_anything_uses_it():
    layer = layer_of("eager")
    with pytest.raises(UserError, match=ERROR):
        layer(x_of()).square().sum().backward(create_graph=True)
    assert layer.weight.grad is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_inside_a_backward_is_none_of_them(use_reentrant):
    layer, x = layer_of("eager"), x_of().requires_grad_()
    checkpoint(layer, x, use_reentrant=use_reentrant).square().sum().backward()
    assert x.grad.any()


@pytest.mark.parametrize("part", ["input", "weight"])
def test_a_frozen_part_gets_no_gradient(part):
    layer, x = layer_of("eager"), x_of().requires_grad_(part != "input")
    layer.weight.requires_grad_(part != "weight")
    layer(x).square().sum().backward()
    assert (x.grad is None, layer.weight.grad is None) == (part == "input", part == "weight")
    assert layer.bias.grad.any()
