"""A layer's three products with formats of published recipes, against float64 emulations, in both layouts."""

import numpy as np
import published_formats
import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import convert
from megalowbit.layers.recipe import recipe

FIELDS = (
    *("q_forward_input", "q_forward_weight", "q_backward_input", "q_backward_weight"),
    "q_backward_outputgrad",
)


def run(chosen, dtype=torch.float32):
    """Output and gradients of a converted layer, and its input, weight and output gradient, as float64."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(72, 40, bias=False)).to(dtype)
    convert(model, chosen)
    x = torch.randn(36, 72).to(dtype).requires_grad_()
    g = (torch.randn(36, 40) * 1e-2).to(dtype)
    output = model(x)
    output.backward(g)
    weight = model[0].weight
    made = [each.detach().double().numpy() for each in (output, x.grad, weight.grad)]
    return made, [each.detach().double().numpy() for each in (x, weight, g)]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (place + other) % 2 == 0 else pytest.mark.slow)
        for place, name in enumerate(published_formats.NAMES)
        for other, layout in enumerate(("single_copy", "per_gemm"))
    ],
)
def test_all_products_multiply_the_numbers_of_the_emulation(name, layout):
    block = dict.fromkeys(FIELDS, name)
    check(recipe({**block, "layout": layout}), dict.fromkeys(block, name))


def test_fp8_with_fine_blocks_for_tokens_and_tiles_for_weights():
    """1 × 128 for inputs and gradients and 128 × 128 for weights, as in DeepSeek-V3 (arXiv:2412.19437)."""
    rows, tiles = "fp8e4m3b:block128", "fp8e4m3b:tile128"
    block = {field: tiles if field.endswith("weight") else rows for field in FIELDS}
    check(recipe({**block, "layout": "per_gemm"}), block)


def check(chosen, names, relative=3e-6):
    def numbers(field, matrix, over):
        """Blocks are along the axis summed over, or along the last one of the tensor."""
        is_turned = over == 0 and chosen.layout == "per_gemm"
        turned = matrix.T.copy() if is_turned else matrix
        made = published_formats.quantized(names[field], turned.astype(np.float32))
        return made.T if is_turned else made

    (output, grad_input, grad_weight), (x, w, g) = run(chosen)
    grad = "q_backward_outputgrad"
    for got, expected in (
        (output, numbers("q_forward_input", x, 1) @ numbers("q_forward_weight", w, 1).T),
        (grad_input, numbers(grad, g, 1) @ numbers("q_backward_weight", w, 0)),
        (grad_weight, numbers(grad, g, 0).T @ numbers("q_backward_input", x, 0)),
    ):
        assert np.abs(got - expected).max() <= relative * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mxfp8e4m3b", "hif4nosr", "ue5m3fp4e2m1bnosr", "fp8e4m3b:tile128"])
def test_layers_in_half_precision_round_the_product_only(name, dtype):
    (output, _, _), (x, w, _) = run(recipe(dict.fromkeys(FIELDS, name)), dtype)
    expected = published_formats.quantized(name, x) @ published_formats.quantized(name, w).T
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-10
    assert np.abs(output - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    ("gemm", "name"),
    [
        ("fp8", "mxfp8e4m3b"),
        ("fp4", "nvfp4e2m1bnosr:token_scale"),
        ("fp4", "hif4nosr"),
        ("fp4", "mxfp8e5m2b"),
    ],
)
def test_tensor_cores_get_only_the_formats_they_read(gemm, name):
    block = dict.fromkeys(FIELDS, name)
    with pytest.raises(UserError, match=f'gemm "{gemm}"'):
        recipe({**block, "layout": "per_gemm", "gemm": gemm})


def test_a_token_scale_keeps_a_layer_causal():
    block = dict.fromkeys(FIELDS, "nvfp4e2m1bnosr:token_scale")
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48))
    convert(model, recipe(block))
    x = torch.randn(8, 64)
    later = x.clone()
    later[4:] *= 1e6
    assert torch.equal(model(x)[:4], model(later)[:4])
