import gc
import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.layers.matmul import function
from megalowbit.layers.matmul.context import MatmulContext
from megalowbit.layers.matmul.function import lowbit_linear
from megalowbit.layers.recipe import Recipe, recipe
from megalowbit.quantize import backends
from megalowbit.quantize.random_stream import RandomStream

NEAREST = recipe({"base": "nvfp4", "name": "nearest", "q_backward_outputgrad": "nvfp4e2m1bnosr"})


def context_with(chosen: Recipe, dtype=torch.float32, **kwargs) -> MatmulContext:
    stream = RandomStream(0)
    return MatmulContext(
        recipe=chosen,
        compute_dtype=dtype,
        random_key=lambda role, device: stream.key("layer", role),
        **kwargs,
    )


def operands(tokens=12, cols=40, rows=24, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cols, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(rows, cols, generator=generator) * 0.05).to(dtype).requires_grad_()
    b = torch.randn(rows, generator=generator).to(dtype).requires_grad_()
    g = (torch.randn(tokens, rows, generator=generator) * 1e-3).to(dtype)
    return x, w, b, g


def close(got, expected, relative):
    expected = torch.as_tensor(expected)
    return (got.double() - expected).abs().max().item() <= relative * expected.abs().max().item()


@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float32, 2e-6), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)]
)
def test_forward_and_gradients_equal_float64_products_of_reference_operands(reference, dtype, relative):
    x, w, b, g = operands(dtype=dtype)
    output = lowbit_linear(x, w, b, context_with(NEAREST, dtype))
    output.backward(g)
    q_x, q_w, q_g = (reference.dequantized(t.detach().float().numpy()) for t in (x, w, g))
    assert output.dtype == dtype
    assert close(output.detach(), q_x @ q_w.T + b.detach().double().numpy(), relative)
    assert close(x.grad, q_g @ q_w, relative)
    assert close(w.grad, q_g.T @ q_x, relative)
    assert close(b.grad, g.double().sum(0), relative)


def test_stochastic_output_gradients_are_those_of_their_key(reference):
    x, w, b, g = operands()
    lowbit_linear(x, w, b, context_with(recipe("nvfp4"))).backward(g)
    from megalowbit.quantize.names import quantizer

    key = RandomStream(0).key("layer", "grad_output")
    q_g = quantizer("nvfp4e2m1b").quantize(g, random_key=key).operand(torch.float64).numpy()
    q_w = reference.dequantized(w.detach().numpy())
    assert close(x.grad, q_g @ q_w, 2e-6)


def test_mixed_recipes_quantise_exactly_the_operands_they_name(reference):
    x, w, b, g = operands()
    chosen = recipe(
        {"base": "bf16", "q_forward_weight": "nvfp4e2m1bnosr", "q_backward_input": "nvfp4e2m1bnosr"}
    )
    output = lowbit_linear(x, w, b, context_with(chosen))
    output.backward(g)
    plain = [t.detach().double().numpy() for t in (x, w, g)]
    q_x, q_w = (reference.dequantized(t.detach().numpy()) for t in (x, w))
    assert close(output.detach() - b.detach(), plain[0] @ q_w.T, 2e-6)
    assert close(x.grad, plain[2] @ plain[1], 2e-6)  # backward weight is not quantised
    assert close(w.grad, plain[2].T @ q_x, 2e-6)  # backward input is, though forward's was not


def test_the_identity_recipe_is_a_plain_linear_layer():
    x, w, b, g = operands()
    lowbit_linear(x, w, b, context_with(recipe("bf16"))).backward(g)
    grads = [t.grad.clone() for t in (x, w, b)]
    for t in (x, w, b):
        t.grad = None
    torch.nn.functional.linear(x, w, b).backward(g)
    for t, grad in zip((x, w, b), grads, strict=True):
        assert torch.allclose(t.grad, grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("frozen", ["input", "weight", "both"])
def test_only_gradients_asked_for_are_computed_and_only_their_operands_saved(frozen):
    x, w, b, g = operands(tokens=64, cols=256, rows=128)
    x.requires_grad_(frozen == "weight")
    w.requires_grad_(frozen == "input")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        output = lowbit_linear(x, w, b, context_with(NEAREST))
    output.backward(g)
    assert (x.grad is None) == (frozen != "weight")
    assert (w.grad is None) == (frozen != "input")
    assert b.grad is not None
    expected = {"input": [64 * 128, 64 * 16, 1], "weight": [128 * 128, 128 * 16, 1], "both": []}[frozen]
    assert saved == expected


def test_saved_bytes_are_four_and_a_half_bits_an_element():
    x, w, b, _ = operands(tokens=256, cols=768, rows=512, dtype=torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        lowbit_linear(x, w, b, context_with(NEAREST, torch.bfloat16))
    assert sum(saved) == (256 + 512) * 768 * 4.5 / 8 + 8


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_non_finite_output_gradient_shows_in_every_gradient(bad, dtype):
    x, w, b, g = operands(dtype=dtype)
    g[3, 5] = bad
    lowbit_linear(x, w, b, context_with(recipe("nvfp4"), dtype)).backward(g)
    assert not x.grad[3].isfinite().any()
    assert not w.grad[:16].isfinite().any()  # the block of output features 0 … 15
    assert w.grad[16:].isfinite().all()
    assert not b.grad[5].isfinite()
    assert x.grad[[0, 1, 2, *range(4, 12)]].isfinite().all()


@pytest.mark.parametrize("operand", ["input", "weight"])
def test_a_non_finite_operand_shows_in_the_output(operand):
    x, w, b, _ = operands()
    with torch.no_grad():
        (x if operand == "input" else w)[2, 7] = math.inf
    output = lowbit_linear(x, w, b, context_with(recipe("nvfp4"))).detach()
    spoiled = output[2] if operand == "input" else output[:, 2]
    assert not spoiled.isfinite().any()
    assert int(output.isfinite().sum()) == output.numel() - spoiled.numel()


@given(
    st.lists(st.integers(0, 4), min_size=0, max_size=3),
    st.integers(1, 35),
    st.integers(1, 35),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(deadline=None, max_examples=60)
def test_any_rank_and_any_size_multiplies_and_differentiates(leading, cols, rows, dtype):
    generator = torch.Generator().manual_seed(cols * 100 + rows)
    x = torch.randn(*leading, cols, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(rows, cols, generator=generator).to(dtype).requires_grad_()
    output = lowbit_linear(x, w, None, context_with(NEAREST, dtype))
    assert output.shape == (*leading, rows)
    output.sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape
    if x.numel():
        plain = torch.nn.functional.linear(x.double(), w.double())
        norm = x.double().norm(dim=-1, keepdim=True) * w.double().norm(dim=1)
        assert ((output.double() - plain).abs() <= 0.5 * norm + 1e-6).all()


def test_gradients_through_strided_inputs_equal_those_of_copies():
    _, w, b, _ = operands(cols=40, rows=24)
    base = torch.randn(40, 6, 5, generator=torch.Generator().manual_seed(1))
    gradients = []
    for make in (lambda t: t.permute(2, 1, 0), lambda t: t.permute(2, 1, 0).contiguous()):
        leaf = base.clone().requires_grad_()
        w.grad = None
        output = lowbit_linear(make(leaf), w, b, context_with(recipe("nvfp4")))
        output.transpose(0, 2).square().sum().backward()  # a strided output gradient, too
        gradients.append((leaf.grad, w.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


def test_an_expanded_output_gradient_is_accepted():
    x, w, b, _ = operands()
    lowbit_linear(x, w, b, context_with(NEAREST)).sum().backward()
    assert np.isfinite(w.grad.numpy()).all()
    assert torch.allclose(b.grad, torch.full((24,), 12.0))


def test_weight_gradients_take_the_weights_dtype():
    x, w, b, g = operands()
    output = lowbit_linear(x, w, b, context_with(NEAREST, torch.bfloat16))
    output.backward(g.bfloat16())
    assert output.dtype == torch.bfloat16
    assert (x.grad.dtype, w.grad.dtype, b.grad.dtype) == (torch.float32,) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_of_the_present_products_are_made_while_they_are_quantised(monkeypatch, dtype):
    decoded = []
    plain = backends.decode

    def recording(request):
        decoded.append(len(request.codes))
        return plain(request)

    monkeypatch.setattr(backends, "decode", recording)
    x, w, _, g = operands(tokens=12, rows=24, dtype=dtype)
    output = lowbit_linear(x, w, None, context_with(NEAREST, dtype))
    assert decoded == []
    output.backward(g)
    assert decoded == [24, 12]  # weight and input, which were kept packed


def test_an_output_gradient_is_dropped_after_its_last_product(monkeypatch):
    """With one copy for each product, that of grad_input is gone when grad_weight is computed."""
    made, alive, quantize, gemm = {}, [], MatmulContext.quantize, function._gemm

    def recorded(self, operand, quantization, **options):
        result = quantize(self, operand, quantization, **options)
        made[quantization.role] = weakref.ref(result.tensor.codes)
        return result

    def checked(context, product, *args, **options):
        if product == "grad_weight":
            alive.extend(role for role, codes in made.items() if "grad" in role and codes() is not None)
        return gemm(context, product, *args, **options)

    monkeypatch.setattr(MatmulContext, "quantize", recorded)
    monkeypatch.setattr(function, "_gemm", checked)
    x, w, _, g = operands(tokens=16)
    gc.disable()
    try:
        output = lowbit_linear(x, w, None, context_with(recipe({"base": "nvfp4", "layout": "per_gemm"})))
        output.backward(g)
        assert alive == ["grad_output_transposed"]
        del output
        assert all(codes() is None for codes in made.values())
    finally:
        gc.enable()
