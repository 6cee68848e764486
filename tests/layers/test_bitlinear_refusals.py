import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, jvp, vjp, vmap

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import restore


@pytest.mark.parametrize(
    ("input", "message"),
    [
        (None, "expects a dense torch tensor, got NoneType"),
        (torch.zeros(2, 64).numpy(), "expects a dense torch tensor, got ndarray"),
        (
            torch.eye(64).to_sparse(),
            "expects a dense torch tensor, got a tensor of layout torch.sparse_coo",
        ),
        (torch.zeros(2, 64, device="meta"), "has its weight on cpu, got an input on meta"),
        (torch.zeros(2, 63), "expects a last axis of 64"),
        (torch.zeros(()), "expects a last axis of 64"),
    ],
)
def test_an_input_of_wrong_size_is_rejected_with_the_layers_name_or_sizes(input, message):
    layer = BitLinear(64, 32)
    with pytest.raises(UserError, match=rf"^BitLinear\(64, 32\) {message}"):
        layer(input)
    layer.layer_name = "h.0.up"
    with pytest.raises(UserError, match=rf"^BitLinear 'h.0.up' {message}"):
        layer(input)


def weights(layer):
    return {name: each.detach() for name, each in layer.named_parameters()}


def stacked(layer):
    return {name: torch.stack([each, each]) for name, each in weights(layer).items()}


TRANSFORMS = {
    "vmap over inputs": lambda layer, x: vmap(layer)(x),
    "vmap over weights": lambda layer, x: vmap(lambda p: functional_call(layer, p, (x,)))(stacked(layer)),
    "vmap that leaves the layer alone": lambda layer, x: vmap(lambda y: y + layer(x).sum())(x),
    "grad": lambda layer, x: grad(lambda p: functional_call(layer, p, (x,)).sum())(weights(layer)),
    "jvp": lambda layer, x: jvp(layer, (x,), (x,)),
    "vjp": lambda layer, x: vjp(layer, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_of_torch_func_is_rejected_and_leaves_the_layer_usable(transform):
    model, x = nn.Sequential(BitLinear(64, 32)), torch.ones(3, 64)
    expected = model(x)
    with pytest.raises(UserError, match=r"^BitLinear\(64, 32\) cannot run inside torch.func.*backward\(\)"):
        transform(model, x)
    assert torch.equal(model(x), expected)
    restore(model)
    transform(model, x)  # the remedy


def test_a_trace_of_torch_jit_is_rejected_and_an_export_is_the_layer():
    layer, x = BitLinear(64, 32).eval(), torch.randn(3, 64)
    with pytest.raises(UserError, match=r"^BitLinear\(64, 32\) cannot be traced by torch.jit.*torch.export"):
        torch.jit.trace(layer, x)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))


def dual(layer, x):
    with forward_ad.dual_level():
        layer(forward_ad.make_dual(x, x))


def dual_weights(layer, x):
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(each, each) for name, each in weights(layer).items()}
        functional_call(layer, duals, (x,))


def batched(layer, x):
    x = x.clone().requires_grad_()
    torch.autograd.grad(layer(x), x, torch.ones(2, 3, 32), is_grads_batched=True)


def by_vmap(layer, x):
    x = x.clone().requires_grad_()
    output = layer(x)
    vmap(lambda grad_output: torch.autograd.grad(output, x, grad_output, retain_graph=True))(
        torch.ones(2, 3, 32)
    )


def dual_later(layer, x):
    """Only a later weight is dual, and so is the layer's output gradient."""
    output = layer(x.clone().requires_grad_())
    with forward_ad.dual_level():
        later = forward_ad.make_dual(torch.ones(32, 1), torch.ones(32, 1))
        torch.autograd.grad((output @ later).sum(), list(layer.parameters()))


AT_ONCE = r"takes one output gradient at a time: call backward for each .*restore"
FORWARD_MODE = r"has no forward-mode derivatives: use backward\(\), or .*restore.*$"


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (dual, FORWARD_MODE),
        (dual_weights, FORWARD_MODE),
        (dual_later, FORWARD_MODE),
        (lambda layer, x: jacobian(layer, x, vectorize=True, strategy="forward-mode"), FORWARD_MODE),
        (batched, AT_ONCE),
        (by_vmap, AT_ONCE),
        (lambda layer, x: jacobian(layer, x, vectorize=True), AT_ONCE),
    ],
    ids=[
        "dual input",
        "dual weights",
        "dual output gradient",
        "forward-mode jacobian",
        "batched gradients",
        "gradients by vmap",
        "vectorised jacobian",
    ],
)
def test_other_ways_of_derivation_are_rejected_with_the_layers_name_and_a_remedy(way, message):
    model, x = nn.Sequential(BitLinear(64, 32)), torch.ones(3, 64)
    expected = model(x)
    with pytest.raises(UserError, match=rf"^BitLinear\(64, 32\) {message}"):
        way(model, x)
    with forward_ad.dual_level():
        assert torch.equal(model(x), expected)  # without a dual tensor
    restore(model)
    way(model, x)  # the remedy


def test_a_functional_call_has_the_bits_of_a_plain_one():
    layer, x = BitLinear(64, 32), torch.randn(3, 64)
    output = functional_call(layer, {name: each * 2 for name, each in weights(layer).items()}, (x,))
    with torch.no_grad():
        for each in layer.parameters():
            each *= 2
    assert torch.equal(output, layer(x))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_rejected_and_its_padded_form_works(layout):
    layer = BitLinear(64, 32)
    nested = torch.nested.nested_tensor([torch.ones(3, 64), torch.ones(2, 64)], layout=layout)
    with pytest.raises(UserError, match=r"^BitLinear\(64, 32\) expects.*got a nested.*to_padded_tensor"):
        layer(nested)
    assert layer(nested.to_padded_tensor(0.0)).shape == (2, 3, 32)


@pytest.mark.parametrize("size", [-1, 1.5, None, "4"])
@pytest.mark.parametrize("name", ["in_features", "out_features"])
def test_an_invalid_layer_size_is_rejected(name, size):
    with pytest.raises(UserError, match=f"{name} of BitLinear must be a whole number ≥ 0, not {size!r}"):
        BitLinear(**{"in_features": 4, "out_features": 4, name: size})


@pytest.mark.parametrize("value", [5, None, "nvfp5", {"base": "nvfp4", "kep": []}])
def test_only_recipes_can_be_set(value):
    layer = BitLinear(64, 32, recipe="mxfp4")
    with pytest.raises(UserError, match="unknown recipe"):
        layer.recipe = value
    assert layer.recipe.name == "mxfp4"


@pytest.mark.parametrize("role", ["input", "grad_output"])
@pytest.mark.parametrize(("shape", "axes"), [((2, 3, 64), "0 to 1"), ((5, 64), "0 to 0"), ((64,), "none")])
def test_a_split_along_a_missing_input_axis_is_rejected_at_the_first_forward(role, shape, axes):
    layer = BitLinear(64, 32, recipe={"base": "nvfp4", f"split_{role}": {"rank": 2, "broadcast_dim": 2}})
    layer.layer_name = "h.0.up"
    message = rf"split_{role}.broadcast_dim = 2 is not a leading axis .*axes: {axes}\): set"
    with pytest.raises(UserError, match=f"^BitLinear 'h.0.up': {message}"):
        layer(torch.ones(shape))
    if role == "grad_output":  # without a graph there will be none
        with torch.no_grad():
            assert layer(torch.ones(shape)).shape == (*shape[:-1], 32)
    assert layer(torch.ones(2, 3, 4, 64)).shape == (2, 3, 4, 32)
