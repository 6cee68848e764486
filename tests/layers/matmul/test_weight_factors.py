"""The product of a weight split into parameters, and its gradients, against float64 of what is defined."""

import fp4_spectrum
import pytest
import torch
from torch import nn

from megalowbit.engine.parameters.split import split_weights
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.matmul.weight_factors import WeightFactors
from megalowbit.layers.recipe import Recipe
from megalowbit.quantize.names import quantizer

RANK = 8
NEAREST = "nvfp4e2m1bnosr"


def effective_weight(layer):
    """What the layer multiplies by: its output for the rows of an identity, without bias, as float64."""
    with torch.no_grad():
        rows = torch.eye(layer.in_features, dtype=layer.weight.dtype)
        output = layer(rows).double().t()
    return output if layer.bias is None else output - layer.bias.detach().double().unsqueeze(1)


def relative_error(found, exact):
    return (torch.linalg.norm(found - exact) / torch.linalg.norm(exact)).item()


def only_the_weight(**changes):
    """A recipe whose other operands are left alone."""
    operands = dict.fromkeys(
        ("q_forward_input", "q_backward_input", "q_backward_weight", "q_backward_outputgrad"), "fp32"
    )
    return Recipe(name="weight", q_forward_weight=NEAREST, **operands, **changes)


def split_layer(whole, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(whole.shape[1], whole.shape[0], bias=False))
    with torch.no_grad():
        model[0].weight.copy_(whole)
    convert(model.to(dtype), only_the_weight(parameter_split={"rank": RANK}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    split_weights(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 0.0), (torch.bfloat16, 0.005)])
def test_the_error_of_a_split_weight_is_that_of_its_residual(dtype, rounding):
    whole = fp4_spectrum.matrix(512, 256)
    u, s, vh = torch.linalg.svd(whole)
    low_rank = u[:, :RANK] * s[:RANK] @ vh[:RANK]
    residual = (whole - low_rank).float()
    plain = relative_error(fp4_spectrum.nvfp4(whole.float()), whole)
    expected = relative_error(fp4_spectrum.nvfp4(residual) + low_rank, whole)
    assert 0.09 < plain < 0.10  # of a split that rounds V as well, .0953
    assert expected < 0.35 * plain
    model, _ = split_layer(whole, dtype)
    error = relative_error(effective_weight(model[0]), whole)
    assert error == pytest.approx((expected**2 + rounding**2) ** 0.5, rel=0.02)


def test_the_error_stays_that_of_the_residual_when_the_factors_move():
    whole = fp4_spectrum.matrix(256, 128)
    model, _ = split_layer(whole)
    w, u, s, before = (part.detach().double() for part in model[0].parts())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # by a tenth, as a few hundred steps do
        v = model[0].split_v
        v += 0.1 * torch.randn(v.shape, generator=generator) * v.norm() / v.numel() ** 0.5
    after = v.detach().double()
    now = w + u * s @ after
    error = relative_error(effective_weight(model[0]), now)
    assert error == pytest.approx(relative_error(fp4_spectrum.nvfp4(w) + u * s @ after, now), rel=0.02)
    plain = relative_error(fp4_spectrum.nvfp4(now), now)
    assert error < 0.35 * plain
    # A residual taken against V as it was rounded at the split is compensated for V as it was.
    compensated = fp4_spectrum.nvfp4(w + u * s @ (before - fp4_spectrum.nvfp4(before)))
    drifted = relative_error(compensated + u * s @ fp4_spectrum.nvfp4(after), now)
    assert drifted > plain


RECIPES = {
    "single copy": {"layout": "single_copy"},
    "per gemm": {"layout": "per_gemm"},
    "per gemm, Hadamard": {"layout": "per_gemm", "hadamard": True},
    "mean of inputs": {"split_input": {"method": "mean"}},
    "split gradients": {"split_grad_output": {"rank": 2, "q_factors": "fp32"}},
    "fp8 GEMMs": {"gemm": "fp8"},
}


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_of_the_product_that_is_defined(name):
    """M is what a plain layer with the weight W_R gets as its gradient; the others follow from it."""
    operand = "mxfp4e2m1bnosr" if name == "fp8 GEMMs" else NEAREST
    operands = (f"q_{side}_{kind}" for side in ("forward", "backward") for kind in ("input", "weight"))
    fields = {**dict.fromkeys(operands, operand), "q_backward_outputgrad": operand, **RECIPES[name]}
    torch.manual_seed(0)
    layer = BitLinear(32, 48, recipe=Recipe(name="x", **fields, parameter_split={"rank": 3}))
    plain = BitLinear(32, 48, recipe=Recipe(name="x", **fields))
    for index, part in enumerate((layer.split_u, layer.split_s, layer.split_v)):
        nn.init.normal_(part, generator=torch.Generator().manual_seed(index))
    layer.is_split = True
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    gradient = torch.randn(32, 48)
    inputs = torch.randn(32, 32)
    x, same_x = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    torch.manual_seed(3)  # of each layer's stream: signs, and where factors start
    output = layer(x)
    output.backward(gradient)
    torch.manual_seed(3)
    plain_output = plain(same_x)
    plain_output.backward(gradient)

    w, u, s, v = (
        part.detach().double() for part in (layer.weight, layer.split_u, layer.split_s, layer.split_v)
    )
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
    parts = [part.clone().requires_grad_() for part in (u, s, v)]
    (w + parts[0] * parts[1] @ parts[2]).backward(plain.weight.grad.double())
    for part, reference in zip((layer.split_u, layer.split_s, layer.split_v), parts, strict=True):
        torch.testing.assert_close(part.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)

    # What the factors add to output and gradient of the input is linear in Q(x) and Q(dY).
    exact = {"rtol": 1e-4, "atol": 1e-3}
    as_multiplied = multiplied(name, operand, inputs, "input")
    added = as_multiplied @ (u * s @ v).t()
    torch.testing.assert_close(output.double() - plain_output.double(), added, **exact)
    if name != "split gradients":
        added = multiplied(name, operand, gradient, "grad_output") @ (u * s @ v)
        torch.testing.assert_close(x.grad.double() - same_x.grad.double(), added, **exact)


def multiplied(name, operand, tensor, role):
    """An operand as the products take it, float64."""
    if name == "mean of inputs" and role == "input":
        mean = tensor.mean(0)
        return quantizer(operand)(tensor - mean).double() + mean.double()
    return quantizer(operand)(tensor).double()


@pytest.mark.parametrize("trained", [("weight",), ("split_u",), ("split_s", "bias"), ("split_v", "split_s")])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_parts_that_are_frozen_get_no_gradient_and_the_others_the_same_one(trained, is_compiled):
    def gradients(names):
        torch.manual_seed(1)
        layer = BitLinear(32, 48, recipe={"base": "nvfp4", "parameter_split": {"rank": 3}})
        layer.recipe = {**layer.recipe.to_dict(), "q_backward_outputgrad": NEAREST}
        for part in (layer.split_u, layer.split_s, layer.split_v):
            nn.init.normal_(part)
        layer.is_split = True
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in names)
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if is_compiled else layer
        run(torch.randn(16, 32)).square().sum().backward()
        return {name: parameter.grad for name, parameter in layer.named_parameters()}

    everything = gradients(("weight", "bias", "split_u", "split_s", "split_v"))
    some = gradients(trained)
    for name, gradient in some.items():
        assert (gradient is None) == (name not in trained)
        assert gradient is None or torch.equal(gradient, everything[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_the_whole_weight_is_found_without_it(dtype):
    generator = torch.Generator().manual_seed(0)
    residual, u, s, v = (
        torch.randn(shape, generator=generator, dtype=dtype) for shape in ((40, 24), (40, 3), (3,), (3, 24))
    )
    exact = (residual.double() + u.double() * s.double() @ v.double()).square().sum()
    found = WeightFactors(u, s, v).squared_norm(residual, residual.double().square().sum())
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(exact.item(), rel=1e-5 if dtype == torch.float32 else 0.02)


def test_an_observer_hears_of_the_residuals_error_beside_the_whole_weight():
    whole, heard = fp4_spectrum.matrix(256, 128), {}
    model, _ = split_layer(whole)

    class Observer:
        def observe(self, layer, role, counts, error):
            heard[role] = (counts, error)

    layer = next(iter(bit_layers(model).values()))
    layer.observer = Observer()
    model.train()(torch.randn(16, 128))
    counts, error = heard["weight"]
    assert counts[0] == layer.weight.numel()
    reported = (error[0] / error[1]).sqrt().item()
    assert reported == pytest.approx(relative_error(effective_weight(layer), whole), rel=0.02)
