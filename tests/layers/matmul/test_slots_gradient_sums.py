"""Low-bit layers add their weights' gradients to fp32 sums themselves; users see what they saw before."""

import copy
import math

import pytest
import torch
from recording_chooser import RecordingChooser
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import megalowbit as mlb
from megalowbit.layers.matmul.gemms import add_product, multiply
from megalowbit.optim.gradients import buffer as buffer_module
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params
from megalowbit.quantize.names import quantizer

NEAREST = {"base": "nvfp4", "name": "nearest", "q_backward_outputgrad": "nvfp4e2m1bnosr"}
HALF = torch.float16  # on a CPU its GEMMs are fp32, so that they can add; those of bf16 are not


def layer_of(inputs=48, outputs=32, *, dtype=HALF, recipe=NEAREST, seed=0, **options):
    torch.manual_seed(seed)
    return mlb.BitLinear(inputs, outputs, recipe=recipe, dtype=dtype, **options)


def batch(seed=0, rows=32, cols=48, dtype=HALF):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x):
    quantized = quantizer("nvfp4e2m1bnosr").quantize(x)
    return quantized.operand(torch.float64)


def is_rounded(sums, dtype=HALF):
    """Whether the numbers are those of a half-precision gradient."""
    return torch.equal(sums, sums.to(dtype).float())


def added_and_returned(run, **options):
    """`run` on a layer that adds to its sum, and on its twin, whose gradient a hook has to see."""
    added = layer_of(**options)
    returned = copy.deepcopy(added)
    seen = []
    for layer in (added, returned):
        GradBuffer(layer.parameters())
    returned.weight.register_hook(lambda gradient: seen.append(gradient))
    for layer in (added, returned):
        torch.manual_seed(1)
        run(layer)
    assert seen
    return added.weight, returned.weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_over_micro_batches_are_at_least_as_exact_as_sums_of_gradients(dtype):
    grads = [batch(seed + 10, cols=32, dtype=dtype) * 2.0**-6 for seed in range(4)]

    def run(layer):
        for seed, grad in enumerate(grads):
            layer(batch(seed, dtype=dtype)).backward(grad)

    added, returned = added_and_returned(run, dtype=dtype)
    expected = sum(exact(grad).t() @ exact(batch(seed, dtype=dtype)) for seed, grad in enumerate(grads))
    errors = [(each.main_grad.double() - expected).norm() / expected.norm() for each in (added, returned)]
    assert errors[0] < 3e-7  # fp32
    assert errors[0] <= errors[1] * 1.2
    if dtype == HALF:
        assert errors[1] > 1e-5  # the test sees the rounding that is gone


def test_the_gradient_is_visible_as_before():
    layer = layer_of()
    buffer = GradBuffer(layer.parameters())
    layer(batch()).float().sum().backward()
    weight = layer.weight
    assert not is_rounded(weight.main_grad)
    assert weight.grad.dtype == torch.float32
    assert weight.grad.data_ptr() == weight.main_grad.data_ptr()
    assert buffer.has_gradients()
    assert buffer.overflowed(is_before=False) == []
    buffer.zero()
    assert weight.grad is None
    assert not buffer.flat.any()


def test_only_weights_with_an_fp32_sum_are_added_to():
    layer = layer_of()
    layer(batch()).float().sum().backward()
    assert layer.weight.grad.dtype == HALF
    buffer = GradBuffer(layer.parameters())
    layer(batch()).float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    buffer.detach()
    layer(batch()).float().sum().backward()
    assert layer.weight.grad.dtype == HALF


def of_tensor(weight, seen):
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))


def after_accumulation(weight, seen):
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.main_grad.clone()))


def of_several(weight, seen):
    torch.autograd.graph.register_multi_grad_hook([weight], lambda found: seen.append(found[0].clone()))


@pytest.mark.parametrize("register", [of_tensor, after_accumulation, of_several])
def test_hooks_on_the_weight_see_its_gradient(register):
    layer, seen = layer_of(), []
    GradBuffer(layer.parameters())
    output = layer(batch()).float().sum()
    register(layer.weight, seen)  # counts also after the forward
    output.backward()
    assert len(seen) == 1
    assert torch.equal(seen[0].float(), layer.weight.main_grad)
    assert is_rounded(layer.weight.main_grad)


def test_a_hook_that_changes_the_gradient_changes_the_sum():
    layer = layer_of()
    GradBuffer(layer.parameters())
    layer.weight.register_hook(torch.zeros_like)
    layer(batch()).float().sum().backward()
    assert not layer.weight.main_grad.any()


def test_hooks_on_autograds_own_node_find_the_sum():
    layer, seen = layer_of(), []
    GradBuffer(layer.parameters())
    node = layer.weight.view_as(layer.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(layer.weight.grad.clone()))
    layer(batch()).float().sum().backward()
    assert torch.equal(seen[0], layer.weight.main_grad)
    assert seen[0].any()


def test_hooks_on_the_module_run():
    layer, seen = layer_of(), []
    GradBuffer(layer.parameters())
    layer.register_full_backward_hook(lambda *found: seen.append(found))
    layer(batch().requires_grad_()).float().sum().backward()
    assert len(seen) == 1
    assert not is_rounded(layer.weight.main_grad)


def test_autograd_grad_returns_the_gradient_and_leaves_the_sum():
    layer = layer_of()
    GradBuffer(layer.parameters())
    layer(batch()).float().sum().backward()
    before = layer.weight.main_grad.clone()
    (found,) = torch.autograd.grad(layer(batch()).float().sum(), [layer.weight])
    torch.testing.assert_close(found.float(), before, rtol=2.0**-10, atol=1e-6)
    assert torch.equal(layer.weight.main_grad, before)
    assert torch.equal(layer.weight.grad, before)


def test_backward_with_inputs_adds_to_these_only():
    layer, x = layer_of(), batch().requires_grad_()
    GradBuffer(layer.parameters())
    layer(x).float().sum().backward(inputs=[x])
    assert not layer.weight.main_grad.any()
    assert layer.weight.grad is None
    layer(x).float().sum().backward(inputs=[layer.weight])
    assert layer.weight.main_grad.any()
    assert not layer.bias.main_grad.any()


def test_a_weight_frozen_before_backward_gets_nothing():
    layer = layer_of()
    GradBuffer(layer.parameters())
    output = layer(batch()).float().sum()
    layer.weight.requires_grad_(False)
    output.backward()
    assert not layer.weight.main_grad.any()
    assert layer.bias.main_grad.any()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
def test_anomaly_detection_sees_a_gradient_that_is_nan():
    layer, x = layer_of(), batch()
    GradBuffer(layer.parameters())
    x[3, 4] = math.nan
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="LowbitLinear"):
        layer(x).float().sum().backward()


def test_a_tied_weight_gets_the_gradients_of_all_its_uses():
    def run(layer):
        embedded = torch.nn.functional.embedding(torch.arange(5), layer.weight)  # autograd adds this one
        (layer(embedded).float().square().sum() + layer(batch()).float().sum()).backward()

    added, returned = added_and_returned(run)
    torch.testing.assert_close(added.main_grad, returned.main_grad, rtol=2.0**-8, atol=2.0**-8)
    assert not torch.equal(added.main_grad, returned.main_grad)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_recomputed_and_retained_graphs_add_as_often_as_they_run(is_reentrant):
    def run(layer):
        x = batch().requires_grad_()
        output = layer(x).float().sum()
        output.backward(retain_graph=True)
        output.backward()
        checkpoint(layer, x, use_reentrant=is_reentrant).float().sum().backward()

    added, returned = added_and_returned(run)
    torch.testing.assert_close(added.main_grad, returned.main_grad, rtol=2.0**-9, atol=1e-3)
    layer = layer_of()
    GradBuffer(layer.parameters())
    layer(batch()).float().sum().backward()
    torch.testing.assert_close(added.main_grad, 3 * layer.weight.main_grad, rtol=1e-5, atol=1e-5)


def clear(weight):
    weight.grad = None
    return torch.zeros_like(weight, dtype=torch.float32)


def replace(weight):
    weight.grad = torch.ones_like(weight)
    return torch.ones_like(weight, dtype=torch.float32)


def edit(weight):
    weight.grad.mul_(2)
    return weight.grad.clone()


@pytest.mark.parametrize("change", [clear, replace, edit])
def test_changes_of_grad_between_micro_batches_count(change):
    layer = layer_of()
    GradBuffer(layer.parameters())
    layer(batch()).float().sum().backward()
    once = layer.weight.main_grad.clone()
    expected = change(layer.weight) + once
    layer(batch()).float().sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_probe_gets_the_product_and_changes_no_bit_of_the_sum(dtype):
    layers = {}
    for has_probe in (False, True):
        layer = layers[has_probe] = layer_of(dtype=dtype)
        layer.chooser = RecordingChooser(has_probe=lambda *_, has_probe=has_probe: has_probe)
        GradBuffer(layer.parameters())
        for seed in range(2):
            layer(batch(seed, dtype=dtype)).float().square().sum().backward()
    plain, probed = layers[False], layers[True]
    assert torch.equal(probed.weight.main_grad, plain.weight.main_grad)
    assert probed.product_counts == plain.product_counts
    seen = [probe.shown["grad_weight"] for _, probe in probed.chooser.probes]
    assert [product.dtype for *_, product, _ in seen] == [dtype, dtype]
    for left, right, product, _ in seen:
        torch.testing.assert_close(product.double(), left.t() @ right, rtol=2.0**-10, atol=1e-3)


def test_a_counter_of_flops_counts_all_three_products():
    layer = layer_of()
    GradBuffer(layer.parameters())
    with FlopCounterMode(display=False) as counter:
        layer(batch().requires_grad_()).float().sum().backward()
    assert not is_rounded(layer.weight.main_grad)
    assert counter.get_total_flops() == 3 * 2 * 32 * 48 * 32


def test_factors_are_divided_out():
    layer, factors = layer_of(bias=False), [4.0]
    GradBuffer(layer.parameters(), factor_of=lambda _: factors[0])
    layer(batch()).float().sum().backward()
    once = layer.weight.main_grad.clone()
    factors[0] = 2.0
    layer(batch()).float().sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, 3 * once, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_gradient_skips_the_step_and_is_located(bad):
    layer = layer_of()
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD(layer.parameters(), lr=0.1),
        grad_scaler=mlb.ConstantGradScaler(1.0),
        bf16=False,
        clip_grad=1.0,
        named_parameters=layer.named_parameters(),
    )
    x = batch()
    x[3, 4] = bad
    layer(x).float()[:2].sum().backward()
    report = optimizer.step()
    assert not report.is_applied
    assert report.overflow.tensor == "weight"
    layer(batch()).float().sum().backward()
    assert optimizer.step().is_applied


def test_a_sum_beyond_fp16_is_a_number():
    layer = layer_of(bias=False)
    GradBuffer(layer.parameters())
    layer(torch.full((32, 48), 96.0, dtype=HALF)).backward(torch.full((32, 32), 96.0, dtype=HALF))
    torch.testing.assert_close(layer.weight.main_grad, torch.full((32, 48), 294912.0), rtol=1e-6, atol=0)


def test_a_sum_in_another_dtype_is_left_to_autograd():
    layer = layer_of()
    GradBuffer(layer.parameters())
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float64)
    layer(batch()).float().sum().backward()
    assert layer.weight.main_grad.any()


@pytest.mark.parametrize(
    "recipe",
    [
        "mxfp4",
        "bf16",
        {"base": "mxfp4", "gemm": "fp8"},
        {**NEAREST, "layout": "per_gemm"},
        {**NEAREST, "layout": "per_gemm", "hadamard": True},
        {**NEAREST, "split_grad_output": {"rank": 4}},
        {**NEAREST, "split_grad_output": {"method": "mean"}},
        {**NEAREST, "split_input": {"rank": 4}, "split_grad_output": {"rank": 4, "gains": "none"}},
        {**NEAREST, "parameter_split": {"rank": 4}},
    ],
    ids=str,
)
def test_every_recipe_sums_the_same_gradient(recipe):
    def run(layer):
        for seed in range(2):
            layer(batch(seed)).backward(batch(seed + 5, cols=32))

    added, returned = added_and_returned(run, recipe=recipe)
    assert added.main_grad.any()
    scale = returned.main_grad.abs().max()
    assert (added.main_grad - returned.main_grad).abs().max() <= 2.0**-9 * scale


@pytest.mark.parametrize("number", [1e-15, 1e15, math.inf, math.nan])
@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "mxfp4e2m1bnosr"])
def test_operands_of_any_size_are_added_as_they_are_multiplied(number, name):
    operand = quantizer(name).quantize(torch.full((32, 32), number))
    arguments = {"transpose_left": True, "compute_dtype": torch.float32}
    total = torch.zeros(32, 32)
    assert add_product(total, operand, operand, factor=1.0, **arguments)
    product = multiply(operand, operand, out_dtype=torch.float32, **arguments)
    torch.testing.assert_close(total, product, rtol=1e-6, atol=0, equal_nan=True)
    assert total.all()


@pytest.mark.parametrize("factor", [1.0, 0.25, 0.3, 2.0**-80])
def test_factors_are_applied(factor):
    left, right = (
        quantizer("mxfp4e2m1bnosr").quantize(batch(seed, dtype=torch.float32)) for seed in range(2)
    )
    total = torch.zeros(48, 48)
    add_product(total, left, right, transpose_left=True, compute_dtype=torch.float32, factor=factor)
    expected = factor * left.operand(torch.float64).t() @ right.operand(torch.float64)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-6 * factor)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float64])
def test_gemms_that_cannot_add_to_fp32_leave_the_sum(compute):
    operand = quantizer("nvfp4e2m1bnosr").quantize(batch(dtype=torch.float32))
    total = torch.ones(48, 48)
    assert not add_product(total, operand, operand, transpose_left=True, compute_dtype=compute, factor=1.0)
    assert torch.equal(total, torch.ones(48, 48))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "mxfp4e2m1bnosr"])
def test_half_precision_gemms_of_a_gpu_add_to_fp32(dtype, name):
    left, right = (quantizer(name).quantize(batch(seed, dtype=dtype).cuda()) for seed in range(2))
    total = torch.ones(48, 48, device="cuda")
    assert add_product(total, left, right, transpose_left=True, compute_dtype=dtype, factor=0.5)
    a, b = (
        each.operand(torch.float64) * (1 if each.operand_scale is None else each.operand_scale.double())
        for each in (left, right)
    )
    torch.testing.assert_close(total.double(), 1 + 0.5 * a.t() @ b, rtol=1e-5, atol=1e-5)


def test_a_capture_adds_on_its_own_stream_and_other_streams_do_not(monkeypatch):
    streams, captures = ["default"], [None]
    monkeypatch.setattr(buffer_module, "_stream_of", lambda _tensor: streams[-1])
    monkeypatch.setattr(buffer_module, "capture_of", lambda _device: captures[-1])
    layer = layer_of()
    buffer = GradBuffer(layer.parameters())
    for stream, capture, adds in (
        ("default", None, True),
        ("side", None, False),  # nothing orders it with the buffer's stream
        ("captured", 1, True),
        ("fork", 1, False),
        ("captured", 1, True),
        ("fork", 2, True),
        ("side", None, False),
        ("default", 2, True),
    ):
        streams.append(stream)
        captures.append(capture)
        buffer.zero()
        layer(batch()).float().sum().backward()
        assert is_rounded(layer.weight.main_grad) is not adds, (stream, capture)
