import numpy as np
import pytest
import torch

from megalowbit.layers.layer_recipe import OPERAND_FIELDS
from megalowbit.layers.matmul.context import MatmulContext
from megalowbit.layers.matmul.function import lowbit_linear
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream

SIGNS = 0b1011_0010_0110_1101
NAMES = {
    "nvfp4": "nvfp4e2m1bnosr",
    "mxfp4": "mxfp4e2m1bnosr",
    "fp32-scaled": "int8b",
    "tiled": "nvfp4e2m1bnosr:tile16",
    "int8 or e5m2": "int8e5m2b",
}
SHAPES = [(32, 48, 64), (13, 33, 21), (1, 1, 1), (50, 16, 5)]


def own_recipe(name, **changes):
    fields = ("q_forward_input", "q_forward_weight", "q_backward_input", "q_backward_weight")
    block = dict.fromkeys((*fields, "q_backward_outputgrad"), name)
    return recipe({**block, "layout": "per_gemm", **changes})


def context_with(chosen, dtype=torch.float32, **kwargs):
    stream = RandomStream(0)
    return MatmulContext(
        recipe=chosen,
        compute_dtype=dtype,
        random_key=lambda role, device: stream.key("layer", role),
        hadamard_signs=SIGNS,
        **kwargs,
    )


def operands(tokens, cols, rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens + cols)
    x = torch.randn(tokens, cols, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(rows, cols, generator=generator) * 0.05).to(dtype).requires_grad_()
    g = (torch.randn(tokens, rows, generator=generator) * 1e-3).to(dtype)
    return x, w, g


def dequantized(name, matrix, key=None):
    """The quantizer's numbers of a matrix, in float64; blocks lie along its last axis."""
    quantized = quantizer(name).quantize(torch.as_tensor(matrix, dtype=torch.float32), random_key=key)
    scale = 1.0 if quantized.operand_scale is None else quantized.operand_scale.double().item()
    return quantized.operand(torch.float64).numpy() * scale


def hadamard_matrix(size, signs):
    """diag(±1) · H / 4 for each group of 16, written out by the sign of (-1)^popcount(i & j)."""
    block = np.array(
        [[(-1.0) ** ((signs >> i & 1) + (i & j).bit_count()) / 4 for j in range(16)] for i in range(16)]
    )
    return np.kron(np.eye(size // 16), block)


def transformed(matrix, signs):
    """Rows padded to whole groups and multiplied by the explicit matrix, then rounded to fp32."""
    padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % 16)))
    return (padded @ hadamard_matrix(padded.shape[1], signs)).astype(np.float32)


def close(got, expected, relative=3e-6):
    return np.abs(got.detach().double().numpy() - expected).max() <= relative * np.abs(expected).max() + 1e-30


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_each_product_gets_blocks_along_the_axis_it_sums_over(name, shape):
    x, w, g = operands(*shape)
    output = lowbit_linear(x, w, None, context_with(own_recipe(name)))
    output.backward(g)
    plain = [t.detach().numpy() for t in (x, w, g)]
    assert close(output, dequantized(name, plain[0]) @ dequantized(name, plain[1]).T)
    assert close(x.grad, dequantized(name, plain[2]) @ dequantized(name, plain[1].T.copy()).T)
    assert close(w.grad, dequantized(name, plain[2].T.copy()) @ dequantized(name, plain[0].T.copy()).T)


@pytest.mark.parametrize("shape", [*SHAPES, (160, 24, 40)])
def test_hadamard_transforms_both_operands_of_the_weights_gradient_and_nothing_else(shape):
    # Small integers: the transform is exact in fp32, so the explicit matrix gives the very same numbers.
    tokens, cols, rows = shape
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(-8, 9, (tokens, cols), generator=generator).float().requires_grad_()
    w = torch.randint(-8, 9, (rows, cols), generator=generator).float().requires_grad_()
    g = torch.randint(-8, 9, (tokens, rows), generator=generator).float()
    name = "nvfp4e2m1bnosr"
    output = lowbit_linear(x, w, None, context_with(own_recipe(name, hadamard=True)))
    output.backward(g)
    plain = [t.detach().double().numpy() for t in (x, w, g)]
    assert close(output, dequantized(name, plain[0]) @ dequantized(name, plain[1]).T)
    assert close(x.grad, dequantized(name, plain[2]) @ dequantized(name, plain[1].T.copy()).T)
    x_t, g_t = (dequantized(name, transformed(each.T, SIGNS)) for each in (plain[0], plain[2]))
    assert close(w.grad, g_t @ x_t.T)


def permutation_tiles(rows, cols, seed):
    """±1 once in each row and column of each 16 × 16 tile, cut to size."""
    generator = torch.Generator().manual_seed(seed)
    tiles = [
        [torch.eye(16)[torch.randperm(16, generator=generator)] for _ in range(-(-cols // 16))]
        for _ in range(-(-rows // 16))
    ]
    signs = torch.randint(0, 2, (rows, cols), generator=generator) * 2.0 - 1
    return torch.cat([torch.cat(each, dim=1) for each in tiles])[:rows, :cols] * signs


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("products", [["output"], ["grad_input"], ["output", "grad_input", "grad_weight"]])
def test_transformed_products_are_exact_where_nothing_is_rounded(products, shape):
    # One ±1 in each group of 16 becomes sixteen times ±1/4, which MXFP4 has.
    tokens, cols, rows = shape
    x, w = (
        permutation_tiles(*size, seed=size[0]).requires_grad_() for size in ((tokens, cols), (rows, cols))
    )
    g = permutation_tiles(tokens, rows, seed=1)
    output = lowbit_linear(x, w, None, context_with(own_recipe("mxfp4e2m1bnosr", hadamard=products)))
    output.backward(g)
    assert torch.equal(output.double(), x.double() @ w.double().t())
    assert torch.equal(x.grad.double(), g.double() @ w.double())
    assert torch.equal(w.grad.double(), g.double().t() @ x.double())


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_hadamard_transforms_the_operands_of_the_products_it_names(name):
    x, w, g = operands(13, 33, 21)
    chosen = own_recipe(name, hadamard=["output", "grad_input"])
    output = lowbit_linear(x, w, None, context_with(chosen))
    output.backward(g)
    x, w, grad_x, grad_w, g = (t.detach().double().numpy() for t in (x, w, x.grad, w.grad, g))

    def rounded(matrix):
        return dequantized(name, transformed(matrix, SIGNS))

    for got, expected in (
        (output.detach().double().numpy(), rounded(x) @ rounded(w).T),
        (grad_x, rounded(g) @ rounded(w.T).T),
        (grad_w, dequantized(name, g.T.copy()) @ dequantized(name, x.T.copy()).T),
    ):
        # the butterfly may round a number at a tie to the other neighbour than the explicit matrix does
        assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)


def test_without_rounding_error_the_transform_cancels():
    x, w, g = operands(37, 24, 40)
    outliers = x.detach().clone()
    outliers[3] *= 100
    x = outliers.requires_grad_()
    lowbit_linear(x, w, None, context_with(own_recipe("fp8e4m3b", hadamard=True))).backward(g)
    exact = g.double().t() @ x.detach().double()
    assert (w.grad - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_layers_round_the_same_products(dtype):
    x, w, g = operands(40, 33, 24, dtype)
    name = "mxfp4e2m1bnosr"
    output = lowbit_linear(x, w, None, context_with(own_recipe(name), dtype))
    output.backward(g)
    plain = [t.detach().float().numpy() for t in (x, w, g)]
    tolerance = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-9
    assert output.dtype == w.grad.dtype == dtype
    assert close(output, dequantized(name, plain[0]) @ dequantized(name, plain[1]).T, tolerance)
    assert close(
        w.grad, dequantized(name, plain[2].T.copy()) @ dequantized(name, plain[0].T.copy()).T, tolerance
    )


@pytest.mark.parametrize("quantized", ["nvfp4e2m1bnosr", "nvfp4e2m1b", "int8b:sr"])
def test_one_copy_gives_the_gradients_of_the_quantised_forward(quantized):
    x, w, g = operands(20, 48, 32)
    block = dict.fromkeys(OPERAND_FIELDS[:4], quantized)
    chosen = recipe({"base": "nvfp4-dequantized-backward", **block})
    lowbit_linear(x, w, None, context_with(chosen)).backward(g)
    stream, g = RandomStream(0), g.double().numpy()
    q_x, q_w = (
        dequantized(quantized, tensor.detach().numpy(), stream.key("layer", role))
        for tensor, role in ((x, "input"), (w, "weight"))
    )
    assert close(x.grad, g @ q_w)
    assert close(w.grad, g.T @ q_x)


def test_the_two_copies_of_an_output_gradient_draw_different_random_numbers():
    x, w, g = operands(32, 32, 32)
    chosen = own_recipe("nvfp4e2m1bnosr", q_backward_outputgrad="nvfp4e2m1b")
    lowbit_linear(x, w, None, context_with(chosen)).backward(g)
    stream = RandomStream(0)
    plain = [t.detach().numpy() for t in (x, w, g)]
    rows = dequantized("nvfp4e2m1b", plain[2], stream.key("layer", "grad_output"))
    columns = dequantized("nvfp4e2m1b", plain[2].T.copy(), stream.key("layer", "grad_output_transposed"))
    assert close(x.grad, rows @ dequantized("nvfp4e2m1bnosr", plain[1].T.copy()).T)
    assert close(w.grad, columns @ dequantized("nvfp4e2m1bnosr", plain[0].T.copy()).T)


def test_operands_that_are_not_quantised_are_multiplied_unchanged():
    x, w, g = operands(20, 24, 40)
    chosen = own_recipe("fp32", q_backward_input="nvfp4e2m1bnosr")
    output = lowbit_linear(x, w, None, context_with(chosen))
    output.backward(g)
    plain = [t.detach().double().numpy() for t in (x, w, g)]
    assert close(output, plain[0] @ plain[1].T)
    assert close(x.grad, plain[2] @ plain[1])
    assert close(w.grad, plain[2].T @ dequantized("nvfp4e2m1bnosr", plain[0].T.copy()).T)


def saved_bytes(chosen, tokens=64, cols=32, rows=48):
    x, w, _ = operands(tokens, cols, rows)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        lowbit_linear(x, w, None, context_with(chosen))
    return sum(saved)


def test_backward_keeps_one_packed_copy_of_each_operand():
    packed = (64 * 32 + 48 * 32) * 4.5 / 8 + 8
    assert saved_bytes(own_recipe("nvfp4e2m1bnosr")) == packed
    assert saved_bytes(own_recipe("nvfp4e2m1bnosr", hadamard=True)) == packed


def test_a_tiled_weight_is_quantised_once_for_both_products():
    roles = []
    x, w, g = operands(32, 32, 32)
    chosen = own_recipe(
        "nvfp4e2m1bnosr", q_forward_weight="nvfp4e2m1b:tile16", q_backward_weight="nvfp4e2m1b:tile16"
    )
    stream = RandomStream(0)
    context = MatmulContext(
        recipe=chosen,
        compute_dtype=torch.float32,
        random_key=lambda role, device: roles.append(role) or stream.key("layer", role),
    )
    lowbit_linear(x, w, None, context).backward(g)
    assert roles == ["weight"]


@pytest.mark.parametrize("frozen", [None, "input", "weight"])
def test_an_output_gradient_is_reported_once(frozen):
    x, w, g = operands(32, 32, 32)
    if frozen is not None:
        (x if frozen == "input" else w).requires_grad_(False)
    seen = []
    context = context_with(
        own_recipe("nvfp4e2m1bnosr"), observe=lambda role, counts, error: seen.append(role)
    )
    lowbit_linear(x, w, None, context).backward(g)
    assert seen == ["input", "weight", "grad_output"]


def test_empty_batches_pass():
    _, w, _ = operands(1, 24, 40)
    empty = torch.zeros(0, 3, 24, requires_grad=True)
    lowbit_linear(empty, w, None, context_with(own_recipe("nvfp4e2m1bnosr", hadamard=True))).sum().backward()
    assert empty.grad.shape == (0, 3, 24)
    assert not w.grad.any()


def test_a_non_finite_output_gradient_reaches_the_gradients():
    x, w, g = operands(40, 32, 32)
    g[3, 5] = torch.inf
    lowbit_linear(x, w, None, context_with(own_recipe("nvfp4e2m1bnosr", hadamard=True))).backward(g)
    assert not x.grad[3].isfinite().any()
    assert not w.grad[5].isfinite().any()
