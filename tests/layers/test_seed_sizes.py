import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import convert, restore
from megalowbit.layers.recipe import Recipe, recipe
from megalowbit.layers.seed_sizes import needed_blocks

SEED = "fp4e2m1b:seed_compat"


def run(layer, tokens, *, leading=()):
    layer(torch.randn(*leading, tokens, layer.in_features, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("in_features", "out_features", "tokens", "message"),
    [
        (24, 32, 16, "in_features = 24 is not a multiple of 16, .*q_forward_input.*recipe.keep"),
        (32, 24, 16, "out_features = 24 is not a multiple of 16, .*q_backward_outputgrad.*recipe.keep"),
        (
            32,
            32,
            10,
            "tokens = 10 is not a multiple of 16, .*split_grad_output.q_factors.*choose batch size.*",
        ),
    ],
)
def test_sizes_that_are_not_whole_blocks_are_rejected_in_forward_by_name(
    in_features, out_features, tokens, message
):
    model = nn.Sequential(nn.Linear(in_features, out_features))
    convert(model, "metis-seed")
    with pytest.raises(UserError, match=rf"^BitLinear '0': {message}, or name a quantizer without") as caught:
        model(torch.randn(tokens, in_features))
    assert "\n" not in str(caught.value)
    assert SEED in str(caught.value)


def test_sizes_of_whole_blocks_train():
    for leading, tokens in (((), 16), ((4,), 12), ((2, 4), 2), ((), 0)):  # of all leading axes together
        run(BitLinear(32, 48, recipe="metis-seed"), tokens, leading=leading)


def test_evaluation_does_not_check_sizes_that_only_gradients_need():
    layer = BitLinear(32, 24, recipe="metis-seed").eval()
    with torch.no_grad():
        layer(torch.randn(1, 32))
    layer(torch.randn(1, 32))
    with pytest.raises(UserError, match="in_features = 24"):
        BitLinear(24, 32, recipe="metis-seed").eval()(torch.randn(16, 24))


def test_a_checkpointed_forward_is_checked_before_its_backward():
    layer = BitLinear(32, 32, recipe="metis-seed")
    with pytest.raises(UserError, match="tokens = 10"):
        checkpoint(layer, torch.randn(10, 32, requires_grad=True), use_reentrant=True)


def every_single_use():
    """Recipes of which one quantizer alone does not pad, with the axis that it sees."""
    plain = dict.fromkeys(
        ("q_forward_input", "q_forward_weight", "q_backward_input", "q_backward_weight"), "int8"
    ) | {"q_backward_outputgrad": "int8"}
    per_gemm = {"q_backward_input": "tokens", "q_backward_weight": "out_features"}
    for layout in ("single_copy", "per_gemm"):
        for field in plain:
            axis = "out_features" if field == "q_backward_outputgrad" else "in_features"
            axis = per_gemm.get(field, axis) if layout == "per_gemm" else axis
            yield Recipe(name="one", **{**plain, field: SEED}, layout=layout), axis
    for field in ("split_input", "split_weight", "split_grad_output"):
        axis = "in_features" if field == "split_input" else "out_features"
        split = {"rank": 2, "method": "svd", "order": "seed", "q_factors": SEED}
        yield Recipe(name="one", **plain, **{field: split}), axis
    yield (
        Recipe(name="one", **plain, split_input={"rank": 2, "method": "svd", "q_factors": SEED}),
        "tokens",
    )


@pytest.mark.parametrize(("chosen", "axis"), list(every_single_use()))
def test_an_axis_is_rejected_if_and_only_if_its_quantizer_would_fail(chosen, axis):
    sizes = {"in_features": 32, "out_features": 48, "tokens": 64}
    run(BitLinear(32, 48, recipe=chosen), 64)
    sizes[axis] = 40
    layer = BitLinear(sizes["in_features"], sizes["out_features"], recipe=chosen)
    with pytest.raises(UserError, match=f"{axis} = 40 is not a multiple"):
        layer(torch.randn(sizes["tokens"], sizes["in_features"]))
    layer._needed_blocks = ()  # unchecked, the quantizer itself fails, later
    with pytest.raises(UserError, match="needs a last axis of whole blocks"):
        run(layer, sizes["tokens"])


def test_other_recipes_accept_any_size():
    for name in ("nvfp4", "metis-nvfp4", "nvidia-nvfp4", "speculative-int8", "bf16"):
        assert needed_blocks(recipe(name)) == ()
    run(BitLinear(5, 7, recipe="nvfp4"), 3)


def test_the_check_follows_the_recipe_through_copies_pickles_and_conversions():
    layer = BitLinear(32, 24, recipe="metis-seed")
    x = torch.randn(16, 32)
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(UserError, match="out_features = 24"):
            each(x)
    layer.recipe = "nvfp4"
    layer(x)
    model = nn.Sequential(nn.Linear(32, 24))
    convert(model, "metis-seed")
    restore(model)
    model(x)
