import copy

import pytest
import torch
from quick_cases import every_value
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import (
    bit_layers,
    cache_weights,
    convert,
    product_counts,
    restore,
    set_observer,
)
from megalowbit.layers.conversion.precision_switch import switch_precision, switched
from megalowbit.layers.recipe import Recipe, recipe, recipes

NEAREST = {"base": "nvfp4", "name": "nearest", "q_backward_outputgrad": "nvfp4e2m1bnosr"}
RECIPES = {
    "nvfp4": "nvfp4",
    "one-copy-each": {"base": "nvfp4", "layout": "per_gemm"},
    "hadamard": {"base": "nvfp4", "layout": "per_gemm", "hadamard": True},
    "tiles": {
        "base": "nvfp4",
        "q_forward_weight": "nvfp4e2m1bnosr:tile16",
        "q_backward_weight": "nvfp4e2m1bnosr:tile16",
        "layout": "per_gemm",
    },
    "mxfp4-in-fp8": {"base": "mxfp4", "gemm": "fp8"},
    "mxfp4-in-fp8-one-copy-each": {"base": "mxfp4", "gemm": "fp8", "layout": "per_gemm"},
    "fp8": "fp8",
    "int8": {"base": "fp8", "q_forward_weight": "int8b", "q_backward_weight": "int8b"},
}


class RecordingObserver:
    def __init__(self):
        self.roles = set()

    def observe(self, layer, role, counts, error):
        self.roles.add(role)


def model_of(chosen, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 32))
    convert(model, chosen, seed=3)
    return model.to(dtype)


def train(model, x, g, steps=1):
    """Output of the last of `steps` micro-batches, and all gradients of it."""
    for _ in range(steps):
        model.zero_grad()
        x = x.detach().requires_grad_()
        output = model(x)
        output.backward(g)
    return output.detach(), [x.grad, *(parameter.grad for parameter in model.parameters())]


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 48, generator=generator).to(dtype)
    return x, (torch.randn(32, 32, generator=generator) * 1e-3).to(dtype)


def in_float64(model, x):
    for layer in model:
        x = x.double() @ layer.weight.detach().double().T + layer.bias.detach().double()
    return x


@pytest.mark.parametrize("chosen", RECIPES.values(), ids=RECIPES)
def test_forward_is_exact_and_backward_quantises_as_before(chosen):
    layer = BitLinear(48, 64, recipe=chosen)
    other = copy.deepcopy(layer)  # makes the random stream of the first at the same torch seed
    x, _ = tensors()
    g = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)) * 1e-3
    torch.manual_seed(5)
    _, before = train(layer, x, g)
    model = nn.ModuleDict({"layer": other})
    assert switch_precision(model, "forward") == 1
    torch.manual_seed(5)
    output, after = train(other, x, g)
    exact = x.double() @ layer.weight.detach().double().T + layer.bias.detach().double()
    assert (output.double() - exact).abs().max() < 1e-5
    for one, two in zip(before, after, strict=True):
        assert torch.equal(one, two)


@every_value(order=["compensated", "seed"], layout=["single_copy", "per_gemm"], is_compiled=[False, True])
def test_after_the_switch_operands_are_split_for_backward_only(order, layout, is_compiled):
    split = {"rank": 4, "order": order}
    splits = {"split_input": split, "split_weight": split, "split_grad_output": split}
    torch.manual_seed(0)
    layer = BitLinear(48, 64, recipe={**NEAREST, "layout": layout, **splits})
    other = copy.deepcopy(layer)
    x, _ = tensors()
    g = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)) * 1e-3
    torch.manual_seed(5)
    _, before = train(layer, x, g)
    switch_precision(other, "forward")
    torch.manual_seed(5)
    run = torch.compile(other, fullgraph=True, backend="aot_eager") if is_compiled else other
    run.zero_grad()
    x = x.detach().requires_grad_()
    output = run(x)
    output.backward(g)
    exact = x.double() @ layer.weight.detach().double().T + layer.bias.detach().double()
    assert (output.double() - exact).abs().max() < 1e-5
    after = [x.grad, *(parameter.grad for parameter in other.parameters())]
    for one, two in zip(before, after, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("layout", ["single_copy", "per_gemm"])
def test_gradients_after_the_switch_are_float64_products_of_reference_operands(reference, layout):
    layer = BitLinear(40, 24, recipe={**NEAREST, "layout": layout})
    generator = torch.Generator().manual_seed(4)
    x, g = torch.randn(12, 40, generator=generator), torch.randn(12, 24, generator=generator)
    switch_precision(layer, "forward")
    _, (grad_input, grad_weight, _) = train(layer, x, g)

    def quantized(matrix):
        return reference.dequantized(matrix.detach().contiguous().numpy())

    if layout == "per_gemm":
        expected = quantized(g) @ quantized(layer.weight.t()).T, quantized(g.t()) @ quantized(x.t()).T
    else:
        expected = quantized(g) @ quantized(layer.weight), quantized(g).T @ quantized(x)
    for got, value in zip((grad_input, grad_weight), map(torch.as_tensor, expected), strict=True):
        assert (got.double() - value).abs().max() <= 2e-6 * value.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", RECIPES.values(), ids=RECIPES)
def test_switching_everything_leaves_plain_linear_layers(chosen, dtype):
    model = model_of(chosen, dtype)
    switch_precision(model, "all")
    x, g = tensors(dtype)
    output, gradients = train(model, x, g)
    plain = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 32)).double()
    plain.load_state_dict(model.state_dict())
    expected, references = train(plain, x.double(), g.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
    for got, value in zip([output, *gradients], [expected, *references], strict=True):
        assert (got.double() - value).abs().max() <= tolerance * value.abs().max()


@pytest.mark.parametrize("name", [name for name, each in recipes().items() if each.quantizes])
@pytest.mark.parametrize("scope", ["forward", "all"])
def test_every_named_recipe_can_be_switched(name, scope):
    if (name, scope) == ("mxfp4-rht", "forward"):
        with pytest.raises(UserError, match="quantises nothing there"):
            switched(recipe(name), scope)
        return
    chosen = switched(recipe(name), scope)
    assert (chosen.q_forward_input, chosen.q_forward_weight) == ("fp32", "fp32")
    assert chosen.quantizes == (scope == "forward")
    assert chosen.name.startswith(f"{name}, {scope}")
    assert Recipe.from_dict(chosen.to_dict()) == chosen


def test_unquantised_operands_are_not_split_transformed_or_multiplied_in_fp8():
    mixed = recipe(
        {
            "base": "nvfp4",
            "q_backward_weight": "fp32",
            "split_input": {"rank": 2},
            "split_weight": {"rank": 2},
            "split_grad_output": {"rank": 2},
        }
    )
    forward = switched(mixed, "forward")
    assert forward.split_weight is None
    assert (forward.split_input, forward.split_grad_output) == (mixed.split_input, mixed.split_grad_output)
    both = switched(forward, "all")
    assert (both.split_input, both.split_grad_output) == (None, None)
    assert both.name == "nvfp4 with own q_backward_weight, split_input, split_weight, split_grad_output, " + (
        "all in high precision"
    )
    block = {"base": "nvfp4", "layout": "per_gemm", "hadamard": ["output", "grad_weight"]}
    assert switched(recipe(block), "forward").transformed_products == ("grad_weight",)
    last = switched(recipe({"base": "mxfp4", "gemm": "fp8", "layout": "per_gemm", "hadamard": True}), "all")
    assert (last.gemm, last.layout, last.hadamard) == ("bf16", "single_copy", False)
    split = recipe({"base": "nvfp4", "parameter_split": {"rank": 2}})
    assert switched(split, "forward").parameter_split == split.parameter_split
    assert switched(split, "all").parameter_split is None


def test_products_in_fp8_continue_in_backward_only():
    model = model_of({"base": "mxfp4", "gemm": "fp8", "q_backward_outputgrad": "mxfp4e2m1bnosr"})
    switch_precision(model, "forward")
    train(model, *tensors())
    counts = product_counts(model)
    assert counts["output"] == {"bf16": 2}
    assert sum(paths.get("fp8", 0) for paths in counts.values()) > 0


def test_the_switch_clears_cached_forward_weights_and_keeps_those_of_backward():
    model = model_of(NEAREST)
    cache = cache_weights(model)
    x, g = tensors()
    train(model, x, g)
    assert len(cache) == 2
    switch_precision(model, "forward")
    assert len(cache) == 0
    output, gradients = train(model, x, g, steps=2)
    assert len(cache) == 2
    assert (output.double() - in_float64(model, x)).abs().max() < 1e-5
    fresh = model_of(NEAREST)
    switch_precision(fresh, "forward")
    _, expected = train(fresh, x, g)
    assert all(torch.equal(one, two) for one, two in zip(gradients, expected, strict=True))


def test_observers_receive_the_counts_of_operands_that_stay_quantised():
    model, observer = model_of("nvfp4"), RecordingObserver()
    set_observer(model, observer)
    switch_precision(model, "forward")
    train(model, *tensors())
    assert observer.roles == {"grad_output"}
    observer.roles.clear()
    switch_precision(model, "all")
    train(model, *tensors())
    assert not observer.roles


def test_a_model_compiled_before_the_switch_is_switched_too():
    model = model_of(NEAREST)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, g = tensors()
    train(compiled, x, g)
    switch_precision(model, "forward")
    output, gradients = train(compiled, x, g)
    eager = model_of(NEAREST)
    switch_precision(eager, "forward")
    expected, references = train(eager, x, g)
    assert torch.equal(output, expected)
    assert all(torch.equal(one, two) for one, two in zip(gradients, references, strict=True))


def test_activation_checkpointing_gives_the_same_gradients_after_the_switch():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 32))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    x, g = tensors()
    models = []
    for build in (
        Checkpointed,
        lambda: nn.ModuleDict({"body": nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 32))}),
    ):
        torch.manual_seed(0)
        model = build()
        convert(model, "nvfp4", seed=1)
        switch_precision(model, "forward")
        models.append(model)
    models[1].forward = models[1].body.forward
    _, gradients = train(models[0], x, g)
    _, expected = train(models[1], x, g)
    assert all(torch.equal(one, two) for one, two in zip(gradients, expected, strict=True))


def test_layers_with_nothing_to_switch_are_unchanged_and_a_switched_model_restores():
    model = model_of("nvfp4")
    backward_only = {"base": "nvfp4", "q_forward_input": "fp32", "q_forward_weight": "fp32"}
    model[1].recipe = recipe(backward_only)
    assert switch_precision(model, "forward") == 1
    assert model[1].recipe == recipe(backward_only)
    assert switch_precision(model, "all") == 2
    restore(model)
    assert not bit_layers(model)


def test_a_switch_that_is_not_possible_is_rejected():
    with pytest.raises(UserError, match=r"unknown scope .*'forwards': did you mean 'forward'\?"):
        switch_precision(model_of("nvfp4"), "forwards")
    with pytest.raises(
        UserError, match=r"none of the 0 BitLinear layers of Linear .*convert the model first"
    ):
        switch_precision(nn.Linear(4, 4))
    model = model_of("nvfp4")
    switch_precision(model, "forward")
    with pytest.raises(UserError, match=r"none of the 2 BitLinear layers of Sequential .*switch once"):
        switch_precision(model, "forward")
    with pytest.raises(UserError, match="recipe 'bf16' quantises nothing there"):
        switched(recipe("bf16"), "all")


def test_a_gradient_quantised_only_for_grad_weight_is_switched_off_with_the_rest():
    own = recipe({"base": "nvfp4", "q_backward_outputgrad_for_weight": "int8:sr"})
    forward = switched(own, "forward")
    assert forward.q_forward_input == forward.q_forward_weight == "fp32"
    assert forward.outputgrad_for_weight == "int8:sr"
    assert not switched(forward, "all").quantizes
    alone = recipe({"base": "bf16", "q_forward_input": "int8", "q_backward_outputgrad_for_weight": "int8"})
    left = switched(alone, "forward")  # still quantises one operand, and so keeps what says how
    assert left.quantizes
    assert left.outputgrad_for_weight == "int8"
    assert not switched(left, "all").quantizes
    with pytest.raises(UserError, match="quantises nothing there"):
        switched(switched(left, "all"), "all")


def test_a_split_of_the_gradient_stays_while_grad_weight_quantises_it():
    block = {"base": "bf16", "q_forward_input": "int8", "q_backward_outputgrad_for_weight": "int8"}
    split = recipe({**block, "split_grad_output": {"rank": 4}})
    assert switched(split, "forward").split_grad_output == split.split_grad_output
    assert switched(split, "all").split_grad_output is None
