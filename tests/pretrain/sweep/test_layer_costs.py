"""What layers cost: bytes against what autograd really keeps, times against sums by hand."""

import pytest
import torch
from tiny_models import tiny_model

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.sweep.layer_costs import bytes_kept, layer_cost, product_time, total

TOKENS, SIZES = 256, (512, 384)


def kept_by_autograd(chosen):
    """Bytes of the storages that a layer's graph holds, without parameter and bias."""
    layer = BitLinear(*SIZES, recipe=chosen, dtype=torch.bfloat16)
    return saved_bytes(layer, torch.randn(TOKENS, SIZES[0], dtype=torch.bfloat16, requires_grad=True))


def saved_bytes(module, input):
    """Bytes of the storages that the graph of a module's output holds, without its parameters."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(input)
    for each in module.parameters():
        storages.pop(each.untyped_storage()._cdata, None)
    assert (output if isinstance(output, torch.Tensor) else output.logits).requires_grad
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
        {"base": "nvfp4", "q_backward_input": "fp32", "split_input": {"rank": 24}},
        {"base": "nvfp4", "q_backward_weight": "fp32", "split_weight": {"rank": 24}},
        {"base": "nvfp4", "split_input": {"method": "mean"}},
        "quartet",
        "metis-seed",
        "mxfp4-rht",
        "speculative-int8",
    ],
    ids=str,
)
def test_bytes_are_those_that_autograd_keeps(chosen):
    found = total([bytes_kept(recipe(chosen), SIZES, TOKENS)])
    assert found == pytest.approx(kept_by_autograd(chosen), rel=0.005)


ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.1.mlp"


@pytest.mark.parametrize(
    "layers",
    [
        {f"{ATTENTION}.q_proj": "fp8"},
        {f"{ATTENTION}.[qkv]_proj": "fp8"},
        {f"{ATTENTION}.[qkv]_proj": "bf16"},
        {f"{ATTENTION}.q_proj": "bf16", f"{ATTENTION}.k_proj": "fp8"},
        {f"{MLP}.up_proj": {"split_input": {"rank": 4}}, f"{MLP}.gate_proj": {"split_input": {"rank": 4}}},
        {f"{MLP}.up_proj": {"split_input": {"method": "mean"}}},
        {f"{MLP}.[gu]*_proj": {"split_input": {"rank": 4}, "q_backward_input": "fp32"}},
        {f"{MLP}.down_proj": "bf16"},
        {f"{MLP}.*": "quartet"},
    ],
    ids=str,
)
def test_bytes_of_layers_that_share_their_input_are_those_that_autograd_keeps(layers):
    changes = []
    for kind in ("counted", "kept"):
        found = [of_a_model(kind, {"base": "nvfp4", "layers": each}) for each in ({}, layers)]
        changes.append(found[1] - found[0])
    assert changes[0] == pytest.approx(changes[1], abs=64)
    assert abs(changes[0]) > 500


def of_a_model(kind, chosen):
    """Bytes of a LLaMA of two blocks: those counted for its layers, or those that autograd keeps."""
    model, ids = tiny_model("llama", hidden_size=64, intermediate_size=96), torch.zeros(2, 32).long()
    convert(model.bfloat16().train(), chosen if kind == "kept" else "nvfp4", seed=0, rank=0)
    if kind == "kept":
        return saved_bytes(model, ids)
    return total(
        bytes_kept(recipe(chosen).of_layer(name), each.sizes, ids.numel(), each.siblings)
        for name, each in bit_layers(model).items()
    )


def test_rank_and_format_change_the_bytes():
    def of(chosen):
        return total([bytes_kept(recipe(chosen), SIZES, TOKENS)])

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


@pytest.mark.parametrize(
    ("name", "speed"),
    [
        *((f"{each}:seed_compat", 4) for each in ("fp4e2m1b", "nvfp4e2m1b", "mxfp4e2m1b", "1p58bit")),
        *((f"{each}:seed_compat", 2) for each in ("fp6e3m2b", "fp8e4m3")),
        *((each, 4) for each in ("int4", "1p58bit", "hif4")),
        *((each, 2) for each in ("int8", "fp6e3m2")),
    ],
)
def test_all_formats_of_four_bits_or_less_have_the_speed_of_four(name, speed):
    chosen = recipe({"base": "nvfp4", "q_forward_input": name, "q_forward_weight": name})
    product = TOKENS * SIZES[0] * SIZES[1]
    assert product_time(chosen, SIZES, TOKENS) == product * (1 / speed + 1 / 4 + 1 / 4)


def test_a_split_adds_the_products_with_its_factors():
    rank, (k, n) = 8, SIZES
    plain = product_time(recipe("nvfp4"), SIZES, TOKENS)
    of_input = product_time(recipe({"base": "nvfp4", "split_input": {"rank": rank}}), SIZES, TOKENS)
    # output: U (tokens, r) times Vᵀ·Wᵀ (r, n); grad_weight: gradᵀ·U (n, r) times Vᵀ (r, k)
    assert of_input - plain == rank * (k * n + TOKENS * n) + rank * (n * TOKENS + n * k)
    half = {"base": "nvfp4", "q_backward_input": "fp32"}
    of_half = product_time(recipe({**half, "split_input": {"rank": rank}}), SIZES, TOKENS)
    assert of_half - product_time(recipe(half), SIZES, TOKENS) == rank * (k * n + TOKENS * n)
    assert total([layer_cost("weights", recipe("nvfp4"), SIZES, TOKENS)]) == k * n
