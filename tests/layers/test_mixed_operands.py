"""Blocks of INT8 or E5M2 as operands: products, layers, what they keep, against float64 by the book."""

import mixed_reference as book
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import convert, set_observer
from megalowbit.layers.matmul.gemms import gemm_dtype, multiply
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NEAREST = {"base": "speculative-int8", "name": "nearest", "q_backward_outputgrad": "int8e5m2b"}
# largest relative error of rounding once to each dtype
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24, FP64: 2.0**-53}


def matrix(rows, cols, seed, *, dtype=FP32, scale=1.0):
    """Gaussian, with an outlier in every third row, so that blocks of both formats are there."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    x[::3, seed % cols] = 150.0
    return (x * scale).to(dtype)


def expected_values(x, size=128):
    """What the quantizer makes of a matrix, rounded to fp32 once, in float64."""
    scales, codes, _ = book.encoded(x.detach().double().numpy(), size)
    return torch.from_numpy(book.decoded(scales, codes, size, x.shape[1])).float().double()


def bound(left, right, compute, out):
    """What rounding may do to left · right: operands to the GEMM's dtype, sums in fp32, the result once."""
    operand = {BF16: 2 * ROUNDING[BF16] * 1.01, FP16: 0.0, FP32: 0.0, FP64: 0.0}[compute]  # on a CPU
    sums = 0.0 if compute == FP64 else left.shape[1] * ROUNDING[FP32]
    magnitude = left.abs() @ right.abs()
    return (operand + sums) * magnitude + 1.01 * ROUNDING[out] * (left @ right).abs() + 1e-12 * magnitude


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("compute", [BF16, FP16, FP32, FP64])
def test_products_equal_float64_within_the_documented_roundings(compute, has_bias):
    x, w = matrix(30, 300, 1), matrix(20, 300, 2, scale=0.02)
    left, right = (quantizer("int8e5m2b").quantize(each) for each in (x, w))
    assert all(torch.signbit(each.scales).any() for each in (left, right))
    bias = torch.randn(20, generator=torch.Generator().manual_seed(3)) if has_bias else None
    got = multiply(left, right, transpose_right=True, compute_dtype=compute, out_dtype=compute, bias=bias)
    a, b = expected_values(x), expected_values(w).t()
    expected = a @ b + (bias.double() if has_bias else 0)
    allowed = bound(a, b, compute, compute) + 2 * ROUNDING[compute] * expected.abs()
    assert got.dtype == compute
    assert ((got.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("other", ["nvfp4e2m1bnosr", "int8", "int8b", "fp32"])
@pytest.mark.parametrize("compute", [BF16, FP16, FP32])
def test_mixed_operands_multiply_operands_of_other_quantizers(other, compute):
    x, w = matrix(16, 256, 4), matrix(24, 256, 5, dtype=compute, scale=0.02)
    left, right = quantizer("int8e5m2b").quantize(x), quantizer(other).quantize(w)
    got = multiply(left, right, transpose_right=True, compute_dtype=compute, out_dtype=FP32)
    a, b = expected_values(x), right.dequantize().double().t()
    magnitude = a.abs() @ b.abs()
    allowed = (3 * ROUNDING[compute] + 256 * ROUNDING[FP32]) * magnitude
    assert ((got.double() - a @ b).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("exact", "compute", "on_cpu", "on_cuda"),
    [
        ((FP16, FP16), BF16, BF16, BF16),
        ((FP16, FP16), FP16, FP32, FP16),
        ((FP16, FP16), FP32, FP32, FP32),
        ((FP16, FP16), FP64, FP64, FP64),
        ((FP16, None), BF16, BF16, BF16),
        ((FP16, None), FP16, FP32, FP16),
        ((FP16, None), FP32, FP32, FP32),
        ((FP16, BF16), BF16, BF16, BF16),
        ((FP16, BF16), FP16, FP32, BF16),  # codes times block scales overflow fp16
        ((FP16, BF16), FP32, FP32, FP32),
        ((FP16, FP32), BF16, FP32, FP32),
        ((FP16, FP32), FP16, FP32, FP32),
        ((BF16, BF16), FP32, FP32, BF16),
        ((BF16, None), FP16, FP32, FP32),
    ],
)
def test_the_gemm_runs_in_the_half_precision_of_the_layer(exact, compute, on_cpu, on_cuda):
    for pair in (exact, exact[::-1]):
        assert gemm_dtype(pair, compute, torch.device("cpu")) == on_cpu
        assert gemm_dtype(pair, compute, torch.device("cuda")) == on_cuda


def layer_of(chosen, in_features, out_features, dtype, seed=0):
    torch.manual_seed(seed)
    layer = BitLinear(in_features, out_features, recipe=chosen, dtype=dtype)
    layer.random_stream, layer.layer_name = RandomStream(1), "layer"
    return layer


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("in_features", "out_features"), [(256, 128), (200, 72)])
def test_a_layers_output_and_gradients_are_products_of_its_dequantised_operands(
    dtype, in_features, out_features
):
    layer = layer_of(NEAREST, in_features, out_features, dtype)
    x = matrix(24, in_features, 6, dtype=dtype).requires_grad_()
    grad = matrix(24, out_features, 7, dtype=dtype, scale=1e-2)
    output = layer(x)
    output.backward(grad)
    q_x, q_w, q_g = (expected_values(each) for each in (x, layer.weight, grad))
    for got, left, right, addend in (
        (output.detach(), q_x, q_w.t(), layer.bias.detach().double()),
        (x.grad, q_g, q_w, 0.0),
        (layer.weight.grad, q_g.t(), q_x, 0.0),
    ):
        expected = left @ right + addend
        allowed = bound(left, right, dtype, dtype) + 2 * ROUNDING[dtype] * expected.abs()
        tiny = 2.0**-24 if dtype == FP16 else 0.0  # its subnormals
        assert got.dtype == dtype
        assert ((got.double() - expected).abs() <= allowed + tiny).all()


def test_the_recipe_rounds_output_gradients_stochastically_with_separate_keys():
    layer = layer_of("speculative-int8", 256, 128, FP32)
    x = matrix(24, 256, 8).requires_grad_()
    grad = matrix(24, 128, 9, scale=1e-2)
    layer(x).backward(grad)
    key = RandomStream(1).key("layer", "grad_output")
    q_g = quantizer("int8e5m2b:sr").quantize(grad, random_key=key).dequantize().double()
    q_w, q_x = expected_values(layer.weight), expected_values(x)
    assert ((x.grad.double() - q_g @ q_w).abs() <= bound(q_g, q_w, FP32, FP32)).all()
    assert ((layer.weight.grad.double() - q_g.t() @ q_x).abs() <= bound(q_g.t(), q_x, FP32, FP32)).all()
    assert not torch.equal(q_g, expected_values(grad))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_layer_saves_eight_and_a_quarter_bits_per_element(dtype):
    layer = layer_of("speculative-int8", 768, 512, dtype)
    x = matrix(256, 768, 10, dtype=dtype).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        layer(x)
    assert sum(saved) == (256 + 512) * 768 * 8.25 / 8


@pytest.mark.parametrize("has_transform", [False, True])
def test_the_copy_for_each_product_has_blocks_along_the_axis_it_sums_over(has_transform):
    chosen = {**NEAREST, "layout": "per_gemm", "hadamard": has_transform}
    layer = layer_of(recipe(chosen), 144, 80, FP32)
    x = matrix(150, 144, 11).requires_grad_()
    grad = matrix(150, 80, 12, scale=1e-2)
    output = layer(x)
    output.backward(grad)
    q_x, q_w = expected_values(x), expected_values(layer.weight)
    assert ((output.double() - q_x @ q_w.t() - layer.bias.double()).abs() <= 1e-4).all()
    q_g, q_w = expected_values(grad), expected_values(layer.weight.t()).t()
    assert ((x.grad.double() - q_g @ q_w).abs() <= bound(q_g, q_w, FP32, FP32)).all()
    if has_transform:
        exact = grad.double().t() @ x.detach().double()
        assert (layer.weight.grad - exact).norm() / exact.norm() < 0.03
        return
    q_g, q_x = expected_values(grad.t()), expected_values(x.t()).t()
    assert ((layer.weight.grad.double() - q_g @ q_x).abs() <= bound(q_g, q_x, FP32, FP32)).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_non_finite_output_gradient_makes_the_gradients_non_finite(bad):
    layer = layer_of("speculative-int8", 256, 200, BF16)
    x = matrix(24, 256, 13, dtype=BF16).requires_grad_()
    grad = matrix(24, 200, 14, dtype=BF16)
    grad[3, 5] = bad
    layer(x).backward(grad)
    assert not x.grad[3].isfinite().any()
    assert not layer.weight.grad[:128].isfinite().any()  # the block of output features 0 … 127
    assert layer.weight.grad[128:].isfinite().all()
    assert x.grad[[0, 1, 2, *range(4, 24)]].isfinite().all()


def test_a_tiny_gpt2_trains_as_in_bf16_without_overflow():
    def losses(name):
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_head": 2, "n_layer": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        report = convert(model, name, seed=3)
        tracker = GradientOverflowTracker()
        set_observer(model, tracker)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model.train()
        found = []
        for step in range(25):
            tokens = torch.randint(0, 8, (8, 32), generator=torch.Generator().manual_seed(step % 5))
            with torch.autocast("cpu", dtype=BF16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.end_step()
            found.append(loss.item())
        return found, report, tracker

    low, report, tracker = losses("speculative-int8")
    high, *_ = losses("bf16")
    assert len(report.swapped) == 8
    assert low[-1] < 0.7 * low[0]
    assert low[-1] == pytest.approx(high[-1], rel=0.02)
    rows = tracker.reduce_layers()
    assert rows
    assert all(row.counts.saturated == 0 and row.counts.nonfinite == 0 for row in rows)
