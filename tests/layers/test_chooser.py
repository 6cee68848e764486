"""A layer with a chooser: what it runs with, what its probe is shown and when, and what that changes."""

import copy
import gc
import math
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.call import Prepared
from megalowbit.layers.chooser import Chooser, Probe
from megalowbit.layers.precision_switch import switch_precision
from megalowbit.layers.recipe import Recipe, recipe
from megalowbit.layers.surgery import bit_layers, cache_weights, convert, restore, set_chooser, set_observer
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantized_tensor import QuantizedTensor

MIXED = recipe(
    {
        "base": "fp8",
        "name": "mixed",
        "q_backward_weight": "int8",
        "q_backward_outputgrad": "int8",
        "q_backward_input": "fp32",
        "q_backward_outputgrad_for_weight": "fp32",
    }
)
ONE_USE = ["input", "weight", "output", "grad_output", "grad_input", "grad_weight"]


class Looking:
    """Notes all that it is shown, as copies; answers with what `answer` makes of the largest magnitude."""

    def __init__(self, answer=lambda largest: None):
        self.answer, self.events, self.shown = answer, [], {}

    def look(self, role, operand):
        assert not operand.requires_grad
        assert not torch.is_autocast_enabled("cpu")
        self.events.append(role)
        self.shown[role] = operand.clone()
        magnitudes = operand.float().abs()
        return self.answer(magnitudes.amax() if operand.numel() else torch.zeros(()))

    def product(self, product, left, right, result, bias):
        assert not result.requires_grad
        assert not torch.is_autocast_enabled("cpu")
        self.events.append(product)
        self.shown[product] = matrix_of(left), matrix_of(right), result.clone(), bias


def matrix_of(factor):
    """The matrix a factor stands for, in float64."""
    tensor = factor.tensor
    values = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.operand()
    values = values.double()
    return (values.t() if factor.is_transposed else values).clone()


class Choosing:
    """Gives every layer the same recipe (or its own), and every use a probe of its own."""

    def __init__(self, chosen=None, answer=lambda largest: None, is_looking=lambda layer, use: True):
        self.chosen, self.answer, self.is_looking = chosen, answer, is_looking
        self.asked, self.probes = [], []

    def recipe(self, layer, base):
        self.asked.append(layer)
        return base if self.chosen is None else self.chosen

    def probe(self, layer, use):
        assert use.is_training
        assert not use.is_replay
        if not self.is_looking(layer, use):
            return None
        self.probes.append((layer, Looking(self.answer)))
        return self.probes[-1][1]

    @property
    def events(self):
        return [probe.events for _, probe in self.probes]


def layer_with(chooser, chosen="nvfp4", sizes=(48, 32), dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(*sizes))
    convert(model, chosen, seed=3)
    model.to(dtype)
    if chooser is not None:
        set_chooser(model, chooser)
    return model


def tensors(sizes=(48, 32), tokens=20, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, sizes[0], generator=generator).to(dtype).requires_grad_()
    return x, (torch.randn(tokens, sizes[1], generator=generator) * 1e-2).to(dtype)


def results(model, x, g):
    """Output and all gradients of one micro-batch."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    output = model(x)
    output.backward(g)
    return [output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def all_equal(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def test_the_protocols_are_met_by_what_has_their_methods():
    assert isinstance(Choosing(), Chooser)
    assert isinstance(Looking(), Probe)
    assert not isinstance(Looking(), Chooser)
    assert not isinstance(Choosing(), Probe)


def test_operands_are_shown_raw_before_products_and_products_as_multiplied():
    chooser = Choosing(recipe("nvfp4"))
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


def rounded(x, scale_to):
    """INT8 under one fp32 scale, in numpy: nearest even on the grid from -127 to 127."""
    x = x.detach().double().numpy()
    scale = np.abs(x).max() / scale_to
    return np.rint(x / scale) * scale


def test_products_of_one_layer_run_with_what_each_was_given():
    """grad_input in int8, grad_weight unquantised, against quantising each in float64."""
    model, (x, g) = layer_with(Choosing(MIXED)), tensors()
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
    chooser = Choosing(chosen)
    results(layer_with(chooser), *tensors())
    seen = chooser.probes[0][1].shown
    assert torch.equal(seen["grad_input"][0], seen["grad_weight"][0])


def test_gradients_rounded_apart_draw_apart():
    chosen = recipe(
        {"base": "fp8", "q_backward_outputgrad": "int4:sr", "q_backward_outputgrad_for_weight": "int4b:sr"}
    )
    chooser = Choosing(chosen)
    results(layer_with(chooser), *tensors(tokens=64))
    seen = chooser.probes[0][1].shown
    rows = seen["grad_weight"][0].abs().unflatten(1, (-1, 16)).amax(2)
    assert rows.unique().numel() > 16  # scales of blocks
    assert seen["grad_input"][0].abs().unique().numel() <= 8
    # one quantiser under both roles would round alike if it drew the same numbers
    layer = BitLinear(48, 32)
    call = layer.call(layer.begin_use(), compute_dtype=torch.float32, needs_grad=True)
    g = torch.linspace(-1, 1, 512).view(16, 32)
    both = [call.quantize(Prepared(g), "int4:sr", role) for role in ("grad_output", "grad_output_for_weight")]
    assert not torch.equal(both[0].tensor.codes, both[1].tensor.codes)


class Heard:
    def __init__(self):
        self.seen = []

    def observe(self, layer, role, counts, error):
        self.seen.append((role, counts, error))


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
def test_an_output_gradient_is_reported_once_whatever_its_quantisers(changes, is_input_frozen, expected):
    block = {
        "base": "bf16",
        "q_backward_outputgrad": "int8",
        "q_backward_outputgrad_for_weight": "fp8e5m2",
        **changes,
    }
    model, (x, g) = layer_with(Choosing(recipe(block)), "fp8"), tensors()
    heard = Heard()
    set_observer(model, heard)
    model(x.detach().requires_grad_(not is_input_frozen)).backward(g)
    assert [role for role, _, _ in heard.seen] == expected
    assert all(counts[0] == g.numel() for _, counts, _ in heard.seen)


def test_a_split_gradient_has_both_quantisers_on_its_residual():
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
    chooser = Choosing(chosen)
    model, (x, g) = layer_with(chooser), tensors()
    for name, parameter in model[0].named_parameters():
        parameter.requires_grad_(name in asked)
    output = model(x.detach().requires_grad_("input" in asked))
    if asked:
        output.backward(g)
    assert chooser.events == [expected]


RECIPES = {
    "nvfp4": "nvfp4",
    "fp8": "fp8",
    "int8": {"base": "fp8", "q_forward_input": "int8", "q_forward_weight": "int8:sr"},
    "per_gemm": {"base": "nvfp4", "layout": "per_gemm"},
    "hadamard": "nvidia-nvfp4",
    "mxfp4 in fp8": {"base": "mxfp4", "gemm": "fp8"},
    "splits": "metis-nvfp4",
    "apart": {"base": "nvfp4", "q_backward_outputgrad_for_weight": "int8:sr", "q_backward_input": "fp8e4m3"},
}


@pytest.mark.parametrize("chosen", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chooser_of_the_layers_own_recipe_changes_no_bit_of_a_training_run(chosen, dtype):
    """Nor do probes that find the largest magnitudes."""
    chosen = {"base": chosen, "keep_last": 0} if isinstance(chosen, str) else chosen
    runs, heard = [], []
    for chooser in (None, Choosing(answer=lambda largest: largest)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32))
        convert(model, chosen, seed=3)
        model.to(dtype)
        heard.append(Heard())
        set_observer(model, heard[-1])
        if chooser is not None:
            set_chooser(model, chooser)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x, _ = tensors(dtype=dtype, seed=step)
            model.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        runs.append([x.grad, *model.parameters()])
    assert len(chooser.probes) == 6
    assert all(events == ONE_USE for events in chooser.events)
    assert all_equal(*runs)
    assert [role for role, _, _ in heard[0].seen] == [role for role, _, _ in heard[1].seen]
    for one, other in zip(heard[0].seen, heard[1].seen, strict=True):
        assert torch.equal(one[1], other[1])
        assert torch.equal(one[2], other[2])


def uniform(name):
    fields = ("q_forward_input", "q_forward_weight", "q_backward_input", "q_backward_weight")
    return recipe({**dict.fromkeys(fields, name), "q_backward_outputgrad": name})


@pytest.mark.parametrize(
    "name", ["int8", "int8:sr", "fp8e4m3", "fp8e5m2", "nvfp4e2m1bnosr", "nvfp4e2m1b", "int4"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spoiled", [None, math.inf, math.nan])
def test_the_maximum_a_probe_hands_on_changes_no_bit(name, dtype, spoiled):
    x, g = tensors(dtype=dtype)
    if spoiled is not None:
        with torch.no_grad():
            x[3, 5] = g[4, 6] = spoiled
    found = [
        results(layer_with(chooser, uniform(name), dtype=dtype), x, g)
        for chooser in (Choosing(), Choosing(answer=lambda largest: largest))
    ]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(nan=7e7), other.nan_to_num(nan=7e7))
        assert one.isnan().any() == (spoiled is not None) or one.isinf().any()


@pytest.mark.parametrize(
    ("chosen", "is_used"),
    [
        (uniform("int8"), True),
        (uniform("fp8e4m3"), True),
        (uniform("nvfp4e2m1bnosr"), True),
        (uniform("nvfp4e2m1bnosr:tile16"), True),
        (replace(uniform("nvfp4e2m1bnosr"), layout="per_gemm"), True),
        (uniform("mxfp4e2m1bnosr"), False),  # blocks alone
        (uniform("int8b"), False),
        (uniform("int8:q_scalar=0.5"), False),  # what the quantiser takes is not the largest magnitude itself
        (uniform("1p58bit"), False),  # a scale from the mean
        (uniform("fp4e2m1:seed_compat"), False),
    ],
    ids=lambda value: f"{value.q_forward_input}, {value.layout}" if isinstance(value, Recipe) else str(value),
)
def test_a_search_is_left_out_where_the_scale_follows_from_the_answer_alone(chosen, is_used):
    """A wrong answer shows it: four times the largest input moves the grid, and with it the output."""
    moved = moved_by_a_wrong_answer(chosen)
    assert moved == [is_used, is_used, is_used, False]  # output, grad_input, grad_weight, grad_bias


def moved_by_a_wrong_answer(chosen):
    x, g = tensors(tokens=32)
    right, wrong = (
        results(layer_with(Choosing(answer=answer), chosen), x, g)
        for answer in (lambda largest: None, lambda largest: 4.3 * largest)
    )
    return [not torch.equal(one, other) for one, other in zip(right, wrong, strict=True)]


def test_what_is_no_longer_the_operand_is_searched():
    """Transformed operands, those of grad_weight here; and the residual of a split."""
    chosen = replace(uniform("nvfp4e2m1bnosr"), layout="per_gemm", hadamard=True)
    assert moved_by_a_wrong_answer(chosen) == [True, True, False, False]
    split = {"rank": 2, "q_factors": "fp32"}
    fields = ("split_input", "split_weight", "split_grad_output")
    assert not any(moved_by_a_wrong_answer(replace(uniform("int8"), **dict.fromkeys(fields, split))))


def test_evaluation_runs_with_the_choice_and_is_not_looked_at():
    chooser, (x, _) = Choosing(uniform("int4")), tensors()
    model = layer_with(chooser, "fp8").eval()
    with torch.no_grad():
        output = model(x)
        expected = layer_with(None, uniform("int4")).eval()(x)
    assert torch.equal(output, expected)
    assert chooser.asked == ["0"]
    assert not chooser.probes


def test_a_training_forward_without_a_graph_is_looked_at_as_far_as_it_goes():
    chooser, (x, _) = Choosing(), tensors()
    model = layer_with(chooser)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(x)
    assert chooser.events == [ONE_USE[:3]] * 2


class Checkpointed(nn.Module):
    def __init__(self, inner, use_reentrant, times=1):
        super().__init__()
        self.inner, self.use_reentrant, self.times = inner, use_reentrant, times

    def forward(self, x):
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return x


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
        chooser = Choosing(answer=lambda largest: largest)
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
    """Which of its uses reentrant checkpointing repeats cannot be told: backward is not shown then."""
    chooser = Choosing()
    model = Checkpointed(nn.Linear(32, 32), use_reentrant, times=2)
    convert(model)
    set_chooser(model, chooser)
    x = torch.randn(8, 32, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    assert chooser.events == [ONE_USE[:3] if use_reentrant else ONE_USE] * 4
    plain = Choosing()
    model = nn.Sequential(*[nn.Linear(32, 32)] * 2)
    convert(model)
    set_chooser(model, plain)
    model(x).sum().backward()
    assert plain.events == [ONE_USE] * 2


def test_a_forward_of_another_micro_batch_does_not_take_a_repeated_ones_probe():
    """As in a pipeline: several forwards, then their backwards, each at its own place of the stream."""
    chooser = Choosing(is_looking=lambda layer, use: use.step == 1)
    model = layer_with(chooser)
    wrapped = Checkpointed(model, True)
    (x, g), stream = tensors(), model[0].random_stream
    outputs = [wrapped(x) for _ in range(3)]
    for step, output in enumerate(outputs, start=1):
        with stream.at(step):
            output.backward(g)
    assert chooser.events == [ONE_USE]


def test_autocast_is_off_while_a_probe_works_and_on_for_the_layer():
    chooser = Choosing(answer=lambda largest: largest)
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
    chooser = Choosing(chosen, answer=lambda largest: largest)
    model = layer_with(chooser)
    x = torch.randn(shape, requires_grad=True)
    output = model(x)
    output.sum().backward()
    assert output.shape == (*shape[:-1], 32)
    assert chooser.events == [ONE_USE]
    assert chooser.probes[0][1].shown["input"].shape == shape
    assert model[0].weight.grad.isfinite().all()


def test_in_float64_products_are_exact_but_for_the_operands():
    chooser = Choosing(uniform("int8"), answer=lambda largest: largest)
    model, (x, g) = layer_with(chooser, dtype=torch.float64), tensors(dtype=torch.float64)
    output, grad_input, *_ = results(model, x, g)
    shown = chooser.probes[0][1].shown
    left, right, result, bias = shown["output"]
    # int8 is made in fp32: the values themselves, so products of the decoded operands are float64's
    assert torch.allclose(result, left @ right.T + bias, rtol=1e-6, atol=1e-6)
    assert output.dtype == grad_input.dtype == result.dtype == torch.float64


def test_a_weight_out_of_the_cache_is_looked_at_too():
    chooser = Choosing(uniform("int8"), answer=lambda largest: largest)
    model, (x, g) = layer_with(chooser), tensors()
    cache = cache_weights(model)
    first, second = results(model, x, g), results(model, x, g)
    assert len(cache) == 1
    assert chooser.events == [ONE_USE] * 2
    assert torch.equal(chooser.probes[1][1].shown["weight"], model[0].weight)
    assert all_equal(first, second)


def test_codes_kept_for_one_choice_are_not_taken_for_another():
    chooser, (x, g) = Choosing(), tensors()
    model = layer_with(chooser)
    cache_weights(model)
    for chosen in (uniform("int8"), uniform("int4"), MIXED, uniform("int8")):
        chooser.chosen = chosen
        assert all_equal(results(model, x, g), results(layer_with(None, chosen), x, g))


def test_products_follow_the_choice_from_step_to_step():
    chooser, (x, g) = Choosing(), tensors()
    model = layer_with(chooser, "fp8")
    for chosen in (uniform("int8"), MIXED, uniform("int4"), uniform("nvfp4e2m1bnosr"), MIXED):
        chooser.chosen = chosen
        assert all_equal(results(model, x, g), results(layer_with(None, chosen), x, g))
    chooser.chosen = recipe("bf16")
    for one, other in zip(results(model, x, g), results(layer_with(None, "bf16"), x, g), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_choice_is_made_from_the_layers_own_recipe_also_after_a_late_switch():
    class Renaming(Choosing):
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
    model, (x, _) = layer_with(Choosing(chosen)), tensors()
    with pytest.raises(UserError, match="parameter_split"):
        model(x)


def test_a_chooser_is_set_on_every_layer_and_taken_off_again():
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    with pytest.raises(UserError, match=r"Sequential has no BitLinear layer .* convert it first") as caught:
        set_chooser(model, Choosing())
    assert "\n" not in str(caught.value)
    set_chooser(model, None)  # nothing to take off
    convert(model)
    chooser = Choosing()
    set_chooser(model, chooser)
    assert all(layer.chooser is chooser for layer in bit_layers(model).values())
    set_chooser(model, None)
    model(torch.randn(2, 32)).sum().backward()
    assert not chooser.asked
    set_chooser(model, chooser)
    restore(model)
    assert not {"chooser", "_chosen", "_waiting"} & {key for layer in model for key in layer.__dict__}
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_no_chooser(duplicate):
    """Its decisions are about the original's layers; and it may hold what cannot be copied."""

    class Fixed(Choosing):
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


def test_a_probe_is_let_go_when_its_graph_is():
    class Weak(Choosing):
        def probe(self, layer, use):
            probe = Looking()
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


@pytest.mark.parametrize("checkpointing", [None, True, False])
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
            choosers.append(None if chosen is None else Choosing(chosen, answer=lambda largest: largest))
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
    chooser = Choosing(uniform("int4"))
    set_chooser(model, chooser)
    output.backward(g)
    expected = results(eager, x, g)
    assert torch.equal(model[0].weight.grad, expected[2])
    assert not chooser.asked


def test_gradients_asked_for_twice_are_shown_twice():
    chooser, (x, g) = Choosing(), tensors()
    output = layer_with(chooser)(x)
    output.backward(g, retain_graph=True)
    output.backward(g)
    assert chooser.events == [ONE_USE + ONE_USE[3:]]
