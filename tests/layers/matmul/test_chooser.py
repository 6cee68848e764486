"""What a layer shows the probe of its chooser: which operands and products, when, and how often."""

import gc
import weakref

import pytest
import torch
from recording_chooser import (
    MIXED,
    ONE_USE,
    Checkpointed,
    RecordingChooser,
    RecordingProbe,
    all_equal,
    layer_with,
    results,
    tensors,
    uniform,
)
from torch import nn

from megalowbit.layers.conversion.convert import bit_layers, cache_weights, convert, set_chooser
from megalowbit.layers.matmul.slots import Chooser, Probe
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.names import quantizer


def test_the_protocols_are_met_by_what_has_their_methods():
    assert isinstance(RecordingChooser(), Chooser)
    assert isinstance(RecordingProbe(), Probe)
    assert not isinstance(RecordingProbe(), Chooser)
    assert not isinstance(RecordingChooser(), Probe)


def test_operands_are_shown_raw_before_products_and_products_as_multiplied():
    chooser = RecordingChooser(recipe("nvfp4"))
    model, (x, g) = layer_with(chooser), tensors()
    x_grad = results(model, x, g)[1]
    ((name, seen),) = chooser.probes
    assert name == "0"
    assert seen.events == ONE_USE
    weight, bias = model[0].weight.detach(), model[0].bias.detach()
    for role, operand in (("input", x), ("weight", weight), ("grad_output", g)):
        assert torch.equal(seen.shown[role], operand)
    nearest = quantizer("nvfp4e2m1bnosr")
    left, right, output, added = seen.shown["output"]
    assert torch.equal(left, nearest(x.detach()).double())
    assert torch.equal(right, nearest(weight).double())
    assert torch.equal(added, bias)
    assert torch.allclose(output.double(), left @ right.T + bias.double(), rtol=0, atol=1e-5)
    left, right, grad_input, added = seen.shown["grad_input"]
    assert added is None
    assert torch.allclose(grad_input.double(), left @ right, rtol=1e-5, atol=1e-7)
    assert torch.equal(grad_input, x_grad)
    left, right, grad_weight, added = seen.shown["grad_weight"]
    assert added is None
    assert torch.allclose(grad_weight.double(), left.T @ right, rtol=1e-5, atol=1e-7)
    assert torch.equal(grad_weight, model[0].weight.grad)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"input"}, ["input", "weight", "output", "grad_output", "grad_input"]),
        ({"weight"}, ["input", "weight", "output", "grad_output", "grad_weight"]),
        ({"bias"}, ["input", "weight", "output"]),
        (set(), ["input", "weight", "output"]),
    ],
)
@pytest.mark.parametrize("chosen", [recipe("nvfp4"), MIXED])
def test_only_what_is_asked_for_is_computed_and_shown(asked, expected, chosen):
    chooser = RecordingChooser(chosen)
    model, (x, g) = layer_with(chooser), tensors()
    for name, parameter in model[0].named_parameters():
        parameter.requires_grad_(name in asked)
    output = model(x.detach().requires_grad_("input" in asked))
    if asked:
        output.backward(g)
    assert chooser.events == [expected]


def test_evaluation_runs_with_the_choice_and_is_not_looked_at():
    chooser, (x, _) = RecordingChooser(uniform("int4")), tensors()
    model = layer_with(chooser, "fp8").eval()
    with torch.no_grad():
        output = model(x)
        expected = layer_with(None, uniform("int4")).eval()(x)
    assert torch.equal(output, expected)
    assert chooser.asked == ["0"]
    assert not chooser.probes


def test_a_training_forward_without_a_graph_is_looked_at_as_far_as_it_goes():
    chooser, (x, _) = RecordingChooser(), tensors()
    model = layer_with(chooser)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(x)
    assert chooser.events == [ONE_USE[:3]] * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("chosen", ["nvfp4", "int8:sr"])
def test_with_checkpointing_a_use_is_looked_at_once_and_backward_by_the_same_probe(use_reentrant, chosen):
    chosen = uniform(chosen) if ":" in chosen else chosen
    x, g = tensors()
    found, seen = [], []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32))
        model = Checkpointed(inner, use_reentrant) if is_checkpointed else inner
        convert(model, chosen, seed=3)
        for number, layer in zip("02", bit_layers(model).values(), strict=True):
            layer.layer_name = number  # names are part of the random numbers' address
        chooser = RecordingChooser(answer=lambda largest: largest)
        set_chooser(model, chooser)
        for _ in range(2):
            found.append(results(model, x, g))
        seen.append(chooser.probes)
        assert chooser.events == [ONE_USE] * 4
    assert all_equal(found[0], found[2])
    assert all_equal(found[1], found[3])
    for (one_name, one), (other_name, other) in zip(*seen, strict=True):
        assert one_name == other_name
        for role in ("input", "weight", "grad_output"):
            assert torch.equal(one.shown[role], other.shown[role])
        for product in ("output", "grad_input", "grad_weight"):
            assert all_equal(one.shown[product][:3], other.shown[product][:3])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_layer_used_twice_has_a_probe_for_each_use(use_reentrant):
    """Which of its uses reentrant checkpointing repeats is unknown: the probe does not get backward then."""
    chooser = RecordingChooser()
    model = Checkpointed(nn.Linear(32, 32), use_reentrant, times=2)
    convert(model)
    set_chooser(model, chooser)
    x = torch.randn(8, 32, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    assert chooser.events == [ONE_USE[:3] if use_reentrant else ONE_USE] * 4
    plain = RecordingChooser()
    model = nn.Sequential(*[nn.Linear(32, 32)] * 2)
    convert(model)
    set_chooser(model, plain)
    model(x).sum().backward()
    assert plain.events == [ONE_USE] * 2


def test_a_forward_of_another_micro_batch_does_not_take_a_repeated_ones_probe():
    """As in a pipeline: several forwards, then their backwards, each at its own place of the stream."""
    chooser = RecordingChooser(has_probe=lambda layer, use: use.step == 1)
    model = layer_with(chooser)
    wrapped = Checkpointed(model, True)
    (x, g), stream = tensors(), model[0].random_stream
    outputs = [wrapped(x) for _ in range(3)]
    for step, output in enumerate(outputs, start=1):
        with stream.at(step):
            output.backward(g)
    assert chooser.events == [ONE_USE]


def test_autocast_is_off_while_a_probe_works_and_on_for_the_layer():
    chooser = RecordingChooser(answer=lambda largest: largest)
    (x, g), expected = tensors(), None
    for chosen in (None, chooser):
        model = layer_with(chosen, uniform("int8"))
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x.detach().requires_grad_())
            assert output.dtype == torch.bfloat16
            output.backward(g.to(torch.bfloat16))
        expected = model[0].weight.grad if expected is None else expected
    assert torch.equal(model[0].weight.grad, expected)
    assert chooser.events == [ONE_USE]
    shown = chooser.probes[0][1].shown
    assert shown["input"].dtype == torch.float32
    assert shown["grad_output"].dtype == torch.bfloat16
    assert shown["output"][2].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "chosen", [uniform("int8"), uniform("nvfp4e2m1bnosr"), MIXED, recipe("fp8")], ids=str
)
@pytest.mark.parametrize("shape", [(0, 48), (3, 0, 48), (48,), (2, 3, 48)])
def test_any_batch_is_looked_at_also_an_empty_one(chosen, shape):
    chooser = RecordingChooser(chosen, answer=lambda largest: largest)
    model = layer_with(chooser)
    x = torch.randn(shape, requires_grad=True)
    output = model(x)
    output.sum().backward()
    assert output.shape == (*shape[:-1], 32)
    assert chooser.events == [ONE_USE]
    assert chooser.probes[0][1].shown["input"].shape == shape
    assert model[0].weight.grad.isfinite().all()


def test_in_float64_products_are_exact_but_for_the_operands():
    chooser = RecordingChooser(uniform("int8"), answer=lambda largest: largest)
    model, (x, g) = layer_with(chooser, dtype=torch.float64), tensors(dtype=torch.float64)
    output, grad_input, *_ = results(model, x, g)
    shown = chooser.probes[0][1].shown
    left, right, result, bias = shown["output"]
    # int8 is made in fp32: the values themselves, so products of the decoded operands are float64's
    assert torch.allclose(result, left @ right.T + bias, rtol=1e-6, atol=1e-6)
    assert output.dtype == grad_input.dtype == result.dtype == torch.float64


def test_a_weight_out_of_the_cache_is_looked_at_too():
    chooser = RecordingChooser(uniform("int8"), answer=lambda largest: largest)
    model, (x, g) = layer_with(chooser), tensors()
    cache = cache_weights(model)
    first, second = results(model, x, g), results(model, x, g)
    assert len(cache) == 1
    assert chooser.events == [ONE_USE] * 2
    assert torch.equal(chooser.probes[1][1].shown["weight"], model[0].weight)
    assert all_equal(first, second)


def test_a_probe_is_let_go_when_its_graph_is():
    class Weak(RecordingChooser):
        def probe(self, layer, use):
            probe = RecordingProbe()
            self.probes.append(weakref.ref(probe))
            return probe

    chooser, (x, g) = Weak(), tensors()
    model = layer_with(chooser)
    output = model(x)
    gc.collect()
    assert chooser.probes[0]() is not None
    output.backward(g)
    del output
    gc.collect()
    assert chooser.probes[0]() is None


def test_gradients_asked_for_twice_are_shown_twice():
    chooser, (x, g) = RecordingChooser(), tensors()
    output = layer_with(chooser)(x)
    output.backward(g, retain_graph=True)
    output.backward(g)
    assert chooser.events == [ONE_USE + ONE_USE[3:]]
