"""What layers cost: bytes against what autograd really keeps, times against sums by hand."""

import pytest
import torch

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.sweep.layer_costs import bytes_kept, num_weights, product_time

TOKENS, SIZES = 256, (512, 384)


def kept_by_autograd(chosen):
    """Bytes of the storages that a layer's graph holds, without parameter and bias."""
    layer = BitLinear(*SIZES, recipe=chosen, dtype=torch.bfloat16)
    input = torch.randn(TOKENS, SIZES[0], dtype=torch.bfloat16, requires_grad=True)
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(input)
    for each in (layer.weight, layer.bias):
        storages.pop(each.untyped_storage()._cdata, None)
    assert output.requires_grad
    return sum(each.nbytes() for each in storages.values())


@pytest.mark.parametrize(
    "chosen",
    [
        "bf16",
        "nvfp4",
        "mxfp4",
        "mxfp8",
        "fp8",
        "nvidia-nvfp4",
        "metis-nvfp4",
        {"base": "nvfp4", "split_weight": {"rank": 8}},
        {"base": "nvfp4", "split_input": {"rank": 24}},
        {"base": "nvfp4", "q_backward_input": "fp32"},
    ],
    ids=str,
)
def test_bytes_are_those_that_autograd_keeps(chosen):
    assert bytes_kept(recipe(chosen), SIZES, TOKENS) == pytest.approx(kept_by_autograd(chosen), rel=0.02)


def test_rank_and_format_change_the_bytes():
    def of(chosen):
        return bytes_kept(recipe(chosen), SIZES, TOKENS)

    assert of("nvfp4") < of({"base": "nvfp4", "split_weight": {"rank": 8}}) < of("mxfp8")
    assert of("bf16") == 2 * TOKENS * SIZES[0]  # the weight is there anyway


def test_the_time_is_that_of_the_units_for_the_wider_operand():
    product = TOKENS * SIZES[0] * SIZES[1]
    assert product_time(recipe("bf16"), SIZES, TOKENS) == 3 * product
    assert product_time(recipe("nvfp4"), SIZES, TOKENS) == 3 * product / 4
    assert product_time(recipe("mxfp8"), SIZES, TOKENS) == 3 * product / 2
    assert product_time(recipe("metis-seed"), SIZES, TOKENS) > 3 * product / 4
    mixed = recipe({"base": "nvfp4", "q_backward_outputgrad": "mxfp8e4m3b"})
    assert product_time(mixed, SIZES, TOKENS) == product * (1 / 4 + 1 / 2 + 1 / 2)
    one = recipe({"base": "nvfp4", "q_backward_input": "fp32"})
    assert product_time(one, SIZES, TOKENS) == product * (1 / 4 + 1 / 4 + 1)


def test_a_split_adds_the_products_with_its_factors():
    rank, (k, n) = 8, SIZES
    plain = product_time(recipe("nvfp4"), SIZES, TOKENS)
    of_input = product_time(recipe({"base": "nvfp4", "split_input": {"rank": rank}}), SIZES, TOKENS)
    # output: U (tokens, r) times Vᵀ·Wᵀ (r, n); grad_weight: gradᵀ·U (n, r) times Vᵀ (r, k)
    assert of_input - plain == rank * (k * n + TOKENS * n) + rank * (n * TOKENS + n * k)
    assert num_weights(recipe("nvfp4"), SIZES, TOKENS) == k * n
