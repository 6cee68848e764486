import pytest
import torch

from megalowbit.layers.matmul.quantizations import Quantizations, serves_both_axes
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.names import quantizer

X = torch.randn(20, 40, generator=torch.Generator().manual_seed(0))
# recipe → of input, weight, backward_input, backward_weight, grad_output, grad_output_for_weight: role and
# quantizer; "ᵀ" where blocks lie along the rows, "H" where the transform applies
CASES = {
    "one copy serves two products": (
        "nvfp4",
        ["input nvfp4e2m1bnosr", "weight nvfp4e2m1bnosr"] * 2 + ["grad_output nvfp4e2m1b"] * 2,
    ),
    "backward has quantizers of its own": (
        {"base": "fp8", "q_backward_input": "int8", "q_backward_weight": "fp32"},
        [
            "input fp8e4m3",
            "weight fp8e4m3",
            "backward_input int8",
            "backward_weight fp32",
            "grad_output fp8e5m2",
            "grad_output fp8e5m2",
        ],
    ),
    "a copy for each product": (
        {"base": "mxfp4", "layout": "per_gemm"},
        [
            "input mxfp4e2m1bnosr",
            "weight mxfp4e2m1bnosr",
            "backward_input mxfp4e2m1bnosrᵀ",
            "backward_weight mxfp4e2m1bnosrᵀ",
            "grad_output mxfp4e2m1b",
            "grad_output_transposed mxfp4e2m1bᵀ",
        ],
    ),
    "tiles serve both axes": (
        {"base": "nvidia-nvfp4"},
        [
            "input nvfp4e2m1bnosr",
            "weight nvfp4e2m1bnosr:tile16",
            "backward_input nvfp4e2m1bnosrᵀH",
            "weight nvfp4e2m1bnosr:tile16",
            "grad_output nvfp4e2m1b",
            "grad_output_transposed nvfp4e2m1bᵀH",
        ],
    ),
    "operands of all products transformed": (
        {"base": "nvidia-nvfp4", "hadamard": ["output", "grad_input", "grad_weight"]},
        [
            "input nvfp4e2m1bnosrH",
            "weight nvfp4e2m1bnosr:tile16H",
            "backward_input nvfp4e2m1bnosrᵀH",
            "backward_weight nvfp4e2m1bnosr:tile16ᵀH",
            "grad_output nvfp4e2m1bH",
            "grad_output_transposed nvfp4e2m1bᵀH",
        ],
    ),
    "a gradient of grad_weight's own": (
        {"base": "fp8", "q_backward_outputgrad_for_weight": "int8"},
        ["input fp8e4m3", "weight fp8e4m3"] * 2 + ["grad_output fp8e5m2", "grad_output_for_weight int8"],
    ),
}


@pytest.mark.parametrize(("block", "expected"), CASES.values(), ids=CASES)
def test_a_recipe_asks_for_these_quantisations(block, expected):
    found = Quantizations.of(recipe(block))
    assert [
        f"{each.role} {each.name}{'ᵀ' * each.is_transposed}{'H' * each.is_transformed}" for each in found
    ] == expected
    operands = ["input", "weight", "input", "weight", "grad_output", "grad_output"]
    assert [each.operand for each in found] == operands
    assert all(getattr(recipe(block), each.field) == each.name for each in found)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("nvfp4", True),
        ({"base": "nvfp4", "q_backward_weight": "fp32"}, False),
        ({"base": "nvfp4", "layout": "per_gemm"}, False),
        (
            {
                "base": "nvfp4",
                "layout": "per_gemm",
                "q_forward_weight": "nvfp4e2m1bnosr:tile16",
                "q_backward_weight": "nvfp4e2m1bnosr:tile16",
            },
            True,
        ),
    ],
)
def test_forwards_weight_codes_serve_backward_where_layout_and_names_allow(block, expected):
    found = Quantizations.of(recipe(block))
    assert (found.backward_weight == found.weight) is expected


@pytest.mark.parametrize(
    "name", ["nvfp4e2m1bnosr", "nvfp4e2m1bnosr:tile16", "int8", "mxfp4e2m1bnosr", "int4b"]
)
def test_a_quantizer_that_serves_both_axes_gives_the_transpose_the_same_numbers(name):
    q = quantizer(name)
    rows, columns = q.quantize(X), q.quantize_transposed(X)
    same = torch.equal(rows.operand(torch.float32).t(), columns.operand(torch.float32))
    assert same == serves_both_axes(name)


def test_what_is_left_as_it_is_serves_both_axes():
    assert serves_both_axes("fp32")
