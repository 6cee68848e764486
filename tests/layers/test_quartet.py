"""The recipe `quartet`: products and masked gradients against float64, in every way that a layer runs."""

import numpy as np
import pytest
import torch

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.names import quantizer

# without random numbers in backward, so that every product has one result
NEAREST = {
    "base": "quartet",
    **dict.fromkeys(("q_backward_input", "q_backward_weight", "q_backward_outputgrad"), "mxfp4e2m1bnosr"),
}
QUEST = "mxfp4e2m1bnosr:quest"


def basis(signs, size):
    """The transform of rows as a float64 matrix: blocks of diag(signs) · H16 / 4."""
    group = torch.tensor(
        [[(-1.0) ** ((signs >> i & 1) + (i & j).bit_count()) / 4 for j in range(16)] for i in range(16)]
    )
    return torch.block_diag(*[group.double()] * (size // 16))


def rounded(name, matrix):
    return quantizer(name)(matrix.float()).double()


def quest(matrix):
    """Numbers by QuEST and what is in their range, from scales alone, not from masks of the package."""
    made = quantizer(QUEST).quantize(matrix.float())
    scales = made.scales.double().repeat_interleave(32, 1)[:, : matrix.shape[1]]
    return made.dequantize().double(), matrix.float().double().abs() < 6 * scales


def expected(x, w, g, signs):
    """Output and gradients in float64, with operands from whole matrices transformed by multiplication."""
    tokens, k, n = *x.shape, w.shape[0]
    turn_k, turn_n, turn_m = basis(signs, k), basis(signs, n), basis(signs, tokens)
    xq, x_inside = quest(x @ turn_k)
    wq, w_inside = quest(w @ turn_k)
    grad = rounded("mxfp4e2m1bnosr", g @ turn_n)
    weight = rounded("mxfp4e2m1bnosr", w.t() @ turn_n)
    grad_input = grad @ weight.t()
    grad_t = rounded("mxfp4e2m1bnosr", g.t() @ turn_m)
    input_t = rounded("mxfp4e2m1bnosr", x.t() @ turn_m)
    grad_weight = grad_t @ input_t.t()
    return (
        xq @ wq.t(),
        (grad_input @ turn_k * x_inside) @ turn_k.t(),
        (grad_weight @ turn_k * w_inside) @ turn_k.t(),
    )


def operands(tokens=48, k=64, n=32):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, k, generator=generator, dtype=torch.float64)
    x[:, 3] *= 8
    w = torch.randn(n, k, generator=generator, dtype=torch.float64) * 0.1
    g = torch.randn(tokens, n, generator=generator, dtype=torch.float64) * 1e-2
    return x.float().double(), w.float().double(), g.float().double()


def layer_of(w, block=NEAREST, dtype=torch.float32):
    layer = BitLinear(w.shape[1], w.shape[0], bias=False, recipe=block, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    return layer


def run(layer, x, g, call=None):
    torch.manual_seed(3)  # of the layer's random stream
    dtype = layer.weight.dtype
    x = x.to(dtype).requires_grad_()
    output = (layer if call is None else call)(x)
    output.backward(g.to(dtype))
    return [each.detach().double() for each in (output, x.grad, layer.weight.grad)]


def signs_of(layer):
    stream = layer.random_stream or layer._layer_stream.stream
    return stream.hadamard_signs(None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_and_masked_gradients_are_those_of_float64(dtype):
    x, w, g = operands()
    layer = layer_of(w, dtype=dtype)
    made = run(layer, x, g)
    for got, wanted in zip(made, expected(x, w, g, signs_of(layer)), strict=True):
        assert (got - wanted).abs().max() <= 3e-6 * wanted.abs().max()


def test_the_mask_takes_something_and_only_the_gradient():
    x, w, g = operands()
    layer = layer_of(w)
    _, grad_input, grad_weight = run(layer, x, g)
    turn = basis(signs_of(layer), 64)
    for gradient, operand in ((grad_input, x), (grad_weight, w)):
        _, inside = quest(operand @ turn)
        share = float((~inside).double().mean())
        assert 0.002 < share < 0.1
        turned = gradient @ turn
        assert turned[~inside].abs().max() < 1e-6 * turned.abs().max()


def test_sizes_need_no_whole_blocks():
    x, w, g = operands(tokens=21, k=40, n=24)
    _, grad_input, grad_weight = run(layer_of(w), x, g)
    assert grad_input.shape == x.shape
    assert grad_weight.shape == w.shape
    true = g @ w, g.t() @ x
    for got, wanted in zip((grad_input, grad_weight), true, strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 0.4


def test_the_mean_gradient_is_the_masked_one_of_the_unrounded_operands():
    """Backward rounds stochastically, so its mean over draws is the exact product, after the same masks."""
    x, w, g = operands(tokens=32)
    layer, count = layer_of(w, "quartet"), 48
    sums = [torch.zeros_like(x), torch.zeros_like(w)]
    squares = [torch.zeros_like(x), torch.zeros_like(w)]
    for _ in range(count):
        layer.weight.grad = None
        for total, square, made in zip(sums, squares, run(layer, x, g)[1:], strict=True):
            total += made
            square += made.square()
    turn = basis(signs_of(layer), 64)
    for total, square, exact, operand in zip(sums, squares, (g @ w, g.t() @ x), (x, w), strict=True):
        wanted = (exact @ turn * quest(operand @ turn)[1]) @ turn.t()
        mean = total / count
        noise = ((square / count - mean.square()) / count).sum().sqrt()
        assert float((mean - wanted).norm() / noise) < 1.3  # 1 for an unbiased one
        assert float((mean - exact).norm() / noise) > 1.5  # the mask shows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_layer_and_one_under_checkpointing_compute_the_same_bits(dtype):
    from torch.utils.checkpoint import checkpoint

    x, w, g = operands(tokens=24, k=40)
    eager = run(layer_of(w, dtype=dtype), x, g)
    compiled = layer_of(w, dtype=dtype)
    torch._dynamo.reset()
    graph = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    repeated = layer_of(w, dtype=dtype)
    for made in (
        run(compiled, x, g, graph),
        run(repeated, x, g, lambda each: checkpoint(repeated, each, use_reentrant=False)),
    ):
        for got, wanted in zip(made, eager, strict=True):
            assert torch.equal(got, wanted)


def test_what_is_kept_is_small_and_a_frozen_weight_needs_no_mask_of_its_input():
    x, w, g = operands(tokens=64)
    layer = layer_of(w)
    torch.manual_seed(3)  # of the layer's random stream
    kept = []

    def note(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        layer(x.float().requires_grad_())
    elements = x.numel() + w.numel()
    assert sum(each.nbytes for each in kept) * 8 <= (4.25 + 1) * elements
    layer.weight.requires_grad_(False)
    frozen = x.float().requires_grad_()
    layer(frozen).backward(g.float())
    assert torch.equal(frozen.grad.double(), run(layer_of(w), x, g)[1])


def test_siblings_and_sums_of_gradients_get_masked_gradients_too():
    """Through `convert`, whose layers share inputs, and with the sum of a fp32 `main_grad`."""
    torch.manual_seed(1)
    x, w, g = operands()

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = torch.nn.Linear(64, 32, bias=False)
            self.k_proj = torch.nn.Linear(64, 32, bias=False)
            self.v_proj = torch.nn.Linear(64, 32, bias=False)
            for each in self.children():
                each.weight.data.copy_(w)

        def forward(self, each):
            return self.q_proj(each), self.k_proj(each), self.v_proj(each)

    model = Pair()
    mlb.convert(model, NEAREST)
    assert model.q_proj.siblings
    given = x.float().requires_grad_()
    torch.autograd.backward(model(given), [g.float()] * 3)
    wanted = expected(x, w, g, signs_of(model.q_proj))
    assert (given.grad.double() - 3 * wanted[1]).abs().max() <= 1e-5 * wanted[1].abs().max()
    for each in model.children():
        assert (each.weight.grad.double() - wanted[2]).abs().max() <= 3e-6 * wanted[2].abs().max()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"q_backward_outputgrad": QUEST}, "q_backward_outputgrad is 'mxfp4e2m1bnosr:quest', which masks"),
        ({"q_backward_input": QUEST, "q_forward_input": "mxfp4e2m1bnosr"}, "q_backward_input is .* masks"),
        ({"split_input": {"method": "mean"}}, "q_forward_input is .* unsplit operands of the forward"),
        ({"parameter_split": {"rank": 4}}, "q_forward_input is .* unsplit operands of the forward"),
    ],
)
def test_masks_of_other_operands_are_refused(block, message):
    with pytest.raises(UserError, match=message) as caught:
        recipe({"base": "quartet", **block})
    assert "\n" not in str(caught.value)


def test_without_transforms_the_mask_is_that_of_the_elements():
    x, w, g = operands()
    block = {"base": "mxfp4", **dict.fromkeys(("q_forward_input", "q_backward_input"), QUEST)}
    layer = layer_of(w, {**block, "q_backward_outputgrad": "mxfp4e2m1bnosr"})
    _, grad_input, grad_weight = run(layer, x, g)
    numbers, inside = quest(x)
    grad = rounded("mxfp4e2m1bnosr", g)
    wanted = grad @ rounded("mxfp4e2m1bnosr", w) * inside
    assert np.allclose(grad_input, wanted, atol=3e-6 * float(wanted.abs().max()))
    assert np.allclose(grad_weight, grad.t() @ numbers, atol=1e-5 * float(grad_weight.abs().max()))
