"""A layer runs with what its chooser gives it, each product with its own, from step to step."""

import copy
import pickle

import numpy as np
import pytest
import torch
from recording_chooser import (
    MIXED,
    ONE_USE,
    Checkpointed,
    RecordingChooser,
    RecordingObserver,
    all_equal,
    layer_with,
    results,
    tensors,
    uniform,
)
from torch import nn

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import (
    bit_layers,
    cache_weights,
    convert,
    restore,
    set_chooser,
    set_observer,
)
from megalowbit.layers.conversion.precision_switch import switch_precision
from megalowbit.layers.matmul.context import SplitOperand
from megalowbit.layers.matmul.quantizations import Quantization
from megalowbit.layers.recipe import recipe


def rounded(x, scale_to):
    """INT8 under one fp32 scale, in numpy: nearest even on the grid from -127 to 127."""
    x = x.detach().double().numpy()
    scale = np.abs(x).max() / scale_to
    return np.rint(x / scale) * scale


def test_products_of_one_layer_run_with_what_each_was_given():
    """grad_input in int8, grad_weight unquantised, against quantising each in float64."""
    model, (x, g) = layer_with(RecordingChooser(MIXED)), tensors()
    _, grad_input, grad_weight, grad_bias = results(model, x, g)
    expected = rounded(g, 127) @ rounded(model[0].weight, 127)
    assert np.abs(grad_input.double().numpy() - expected).max() < 2e-6 * np.abs(expected).max()
    exact = g.double().T @ x.detach().double()
    assert (grad_weight.double() - exact).abs().max() < 2e-6 * exact.abs().max()
    assert torch.allclose(grad_bias.double(), g.double().sum(0), rtol=1e-5, atol=1e-8)
    plain = g.double() @ model[0].weight.detach().double()
    assert (grad_input.double() - plain).abs().max() > 1e-3 * plain.abs().max()  # int8 can be told from none


@pytest.mark.parametrize("own", [None, "int8:sr"])
def test_a_gradient_both_products_want_alike_is_rounded_once(own):
    chosen = recipe(
        {"base": "fp8", "q_backward_outputgrad": "int8:sr", "q_backward_outputgrad_for_weight": own}
    )
    chooser = RecordingChooser(chosen)
    results(layer_with(chooser), *tensors())
    seen = chooser.probes[0][1].shown
    assert torch.equal(seen["grad_input"][0], seen["grad_weight"][0])


def test_gradients_rounded_apart_draw_apart():
    chosen = recipe(
        {"base": "fp8", "q_backward_outputgrad": "int4:sr", "q_backward_outputgrad_for_weight": "int4b:sr"}
    )
    chooser = RecordingChooser(chosen)
    results(layer_with(chooser), *tensors(tokens=64))
    seen = chooser.probes[0][1].shown
    rows = seen["grad_weight"][0].abs().unflatten(1, (-1, 16)).amax(2)
    assert rows.unique().numel() > 16  # scales of blocks
    assert seen["grad_input"][0].abs().unique().numel() <= 8
    # one quantizer under both roles would round alike if it drew the same numbers
    layer = BitLinear(48, 32)
    context = layer.context(layer.begin_use(), compute_dtype=torch.float32, needs_grad=True)
    g = torch.linspace(-1, 1, 512).view(16, 32)
    roles = [Quantization(role, "int4:sr", "") for role in ("grad_output", "grad_output_for_weight")]
    both = [context.quantize(SplitOperand(g), role) for role in roles]
    assert not torch.equal(both[0].tensor.codes, both[1].tensor.codes)


@pytest.mark.parametrize(
    ("changes", "is_input_frozen", "expected"),
    [
        ({}, False, ["grad_output"]),
        ({}, True, ["grad_output"]),
        ({"q_backward_outputgrad": "fp32"}, False, ["grad_output"]),
        ({"q_backward_outputgrad_for_weight": "fp32"}, False, ["grad_output"]),
        ({"q_backward_outputgrad_for_weight": "fp32"}, True, []),
    ],
)
def test_an_output_gradient_is_reported_once_whatever_its_quantizers(changes, is_input_frozen, expected):
    block = {
        "base": "bf16",
        "q_backward_outputgrad": "int8",
        "q_backward_outputgrad_for_weight": "fp8e5m2",
        **changes,
    }
    model, (x, g) = layer_with(RecordingChooser(recipe(block)), "fp8"), tensors()
    observer = RecordingObserver()
    set_observer(model, observer)
    model(x.detach().requires_grad_(not is_input_frozen)).backward(g)
    assert [role for role, _, _ in observer.seen] == expected
    assert all(counts[0] == g.numel() for _, counts, _ in observer.seen)


def test_a_split_gradient_has_both_quantizers_on_its_residual():
    block = {
        "base": "fp8",
        "split_grad_output": {"rank": 4, "q_factors": "fp32", "method": "svd"},
        "q_backward_outputgrad": "int4",
        "q_backward_outputgrad_for_weight": "int8",
        "q_backward_weight": "fp32",
        "q_backward_input": "fp32",
    }
    model, (x, g) = layer_with(None, block), tensors()
    _, grad_input, grad_weight, _ = results(model, x, g)
    exact = g.double() @ model[0].weight.detach().double(), g.double().T @ x.detach().double()
    errors = [
        ((found.double() - right).norm() / right.norm()).item()
        for found, right in zip((grad_input, grad_weight), exact, strict=True)
    ]
    assert errors[1] < 0.01 < errors[0] < 0.2


def test_codes_kept_for_one_choice_are_not_taken_for_another():
    chooser, (x, g) = RecordingChooser(), tensors()
    model = layer_with(chooser)
    cache_weights(model)
    for chosen in (uniform("int8"), uniform("int4"), MIXED, uniform("int8")):
        chooser.chosen = chosen
        assert all_equal(results(model, x, g), results(layer_with(None, chosen), x, g))


def test_products_follow_the_choice_from_step_to_step():
    chooser, (x, g) = RecordingChooser(), tensors()
    model = layer_with(chooser, "fp8")
    for chosen in (uniform("int8"), MIXED, uniform("int4"), uniform("nvfp4e2m1bnosr"), MIXED):
        chooser.chosen = chosen
        assert all_equal(results(model, x, g), results(layer_with(None, chosen), x, g))
    chooser.chosen = recipe("bf16")
    for one, other in zip(results(model, x, g), results(layer_with(None, "bf16"), x, g), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_choice_is_made_from_the_layers_own_recipe_also_after_a_late_switch():
    class Renaming(RecordingChooser):
        def recipe(self, layer, base):
            self.asked.append(base.name)
            return base

    chooser, (x, g) = Renaming(), tensors()
    model = layer_with(chooser, {"base": "fp8", "q_backward_outputgrad_for_weight": "int8"})
    results(model, x, g)
    switch_precision(model, "forward")
    assert model[0].chooser is chooser
    output, *_ = results(model, x, g)
    exact = x.detach().double() @ model[0].weight.detach().double().T + model[0].bias.detach().double()
    assert (output.double() - exact).abs().max() < 1e-5
    first = "fp8 with own q_backward_outputgrad_for_weight"
    assert chooser.asked == [first, f"{first}, forward in high precision"]


def test_a_choice_that_does_not_fit_the_layer_is_refused():
    chosen = recipe({"base": "nvfp4", "parameter_split": {"rank": 4}})
    model, (x, _) = layer_with(RecordingChooser(chosen)), tensors()
    with pytest.raises(UserError, match="parameter_split"):
        model(x)


def test_a_chooser_is_set_on_every_layer_and_taken_off_again():
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    with pytest.raises(UserError, match=r"Sequential has no BitLinear layer .* convert it first") as caught:
        set_chooser(model, RecordingChooser())
    assert "\n" not in str(caught.value)
    set_chooser(model, None)  # nothing to take off
    convert(model)
    chooser = RecordingChooser()
    set_chooser(model, chooser)
    assert all(layer.chooser is chooser for layer in bit_layers(model).values())
    set_chooser(model, None)
    model(torch.randn(2, 32)).sum().backward()
    assert not chooser.asked
    set_chooser(model, chooser)
    restore(model)
    assert not {"chooser", "_chosen", "_pending_probe"} & {key for layer in model for key in layer.__dict__}
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_no_chooser(duplicate):
    """Its decisions are about the original's layers; and it may hold what cannot be copied."""

    class Fixed(RecordingChooser):
        def __reduce_ex__(self, protocol):
            raise TypeError("not to be copied")

    model, (x, g) = layer_with(None, uniform("int8")), tensors()
    expected = results(model, x, g)
    chooser = Fixed(uniform("int4"))
    set_chooser(model, chooser)
    with torch.no_grad():
        model(x)  # its probe waits for a backward
    copied = duplicate(model)
    assert copied[0].chooser is None
    assert model[0].chooser is chooser
    assert all_equal(results(copied, x, g), expected)
    assert len(chooser.probes) == 1


@pytest.mark.parametrize(
    "checkpointing", [False, *(pytest.param(each, marks=pytest.mark.slow) for each in (None, True))]
)
def test_a_compiled_model_with_a_chooser_runs_as_without_compiling(checkpointing):
    x, g = tensors(sizes=(48, 48))

    def model_of():
        torch.manual_seed(0)
        inner = nn.Sequential(*(nn.Linear(48, 48) for _ in range(10)))
        model = inner if checkpointing is None else Checkpointed(inner, checkpointing)
        convert(model, "nvfp4", seed=3)
        return model

    eager, model = model_of(), model_of()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    choosers = []
    for chosen in (None, uniform("int8:sr"), MIXED, None):
        for each in (eager, model):
            choosers.append(
                None if chosen is None else RecordingChooser(chosen, answer=lambda largest: largest)
            )
            set_chooser(each, choosers[-1])
        assert all_equal(results(eager, x, g), results_of(compiled, model, x, g))
        if chosen is not None:
            assert choosers[-1].events == choosers[-2].events == [ONE_USE] * 10


def results_of(compiled, model, x, g):
    model.zero_grad()
    x = x.detach().requires_grad_()
    output = compiled(x)
    output.backward(g)
    return [output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def test_a_chooser_set_between_a_compiled_forward_and_its_backward_comes_after_it():
    x, g = tensors()
    model, eager = layer_with(None), layer_with(None)
    torch._dynamo.reset()
    output = torch.compile(model, backend="aot_eager")(x)
    chooser = RecordingChooser(uniform("int4"))
    set_chooser(model, chooser)
    output.backward(g)
    expected = results(eager, x, g)
    assert torch.equal(model[0].weight.grad, expected[2])
    assert not chooser.asked
