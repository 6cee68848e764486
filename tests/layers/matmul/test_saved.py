import pytest
import torch

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.matmul.function import forward_products
from megalowbit.layers.matmul.saved import parts_of, template
from megalowbit.layers.recipe import recipe


def doubles_the_fourth(values):
    """A user's gain that needs four singular values."""
    factors = torch.ones_like(values)
    factors[3] = 2
    return factors, 0.5


SPLITS = {
    "none": {},
    "warm": {"split_input": {"rank": 3}, "split_weight": {"rank": 0.1}},
    "gains": {"split_input": {"rank": 3, "gains": "ysche"}},
    "unquantised factors": {"split_input": {"rank": 3, "q_factors": "fp32"}},
    "mean": {"split_input": {"method": "mean"}},
    "own gain": {"split_input": {"rank": 8, "gains": f"{__name__}:doubles_the_fourth"}},
}
RECIPES = {
    "nvfp4": {"base": "nvfp4"},
    "mxfp4 per product": {"base": "mxfp4", "layout": "per_gemm"},
    "mxfp4 in FP8": {"base": "mxfp4", "gemm": "fp8"},
    "transformed": {"base": "nvfp4", "layout": "per_gemm", "hadamard": True},
    "all transformed": {
        "base": "nvfp4",
        "layout": "per_gemm",
        "hadamard": ["output", "grad_input", "grad_weight"],
    },
    "int8 or e5m2": {"base": "speculative-int8"},
    "int8 or e5m2, transformed": {"base": "speculative-int8", "layout": "per_gemm", "hadamard": True},
    "unquantised backward": {"base": "nvfp4", "q_backward_input": "fp32"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("base", RECIPES.values(), ids=RECIPES)
def test_what_is_kept_has_the_shapes_expected_and_comes_back_as_it_was(base, changes, dtype):
    layer = BitLinear(40, 24, recipe=recipe({**base, **changes}), dtype=dtype)
    x = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    context = layer.context(layer.begin_use(), compute_dtype=dtype, needs_grad=True)
    kept = forward_products(context, x, layer.weight, None, keeps_input=True, keeps_weight=True)
    for operand, expected, like in (
        (kept.input, template(layer.recipe, "input", layer.sizes, x.shape, dtype, layer.weight.shape), x),
        (
            kept.weight,
            template(layer.recipe, "weight", layer.sizes, layer.weight.shape, dtype, x.shape),
            layer.weight,
        ),
    ):
        parts = parts_of(operand, is_shared=False)
        empty = expected.empty_parts(like)
        assert [(p.shape, p.dtype) for p in parts] == [(p.shape, p.dtype) for p in empty]
        again, rest = expected.filled([*parts, torch.zeros(3)])
        assert [each.shape for each in rest] == [(3,)]
        assert again.is_transposed == operand.is_transposed
        assert torch.equal(again.tensor.operand(torch.float32), operand.tensor.operand(torch.float32))
        assert (again.low_rank is None) == (operand.low_rank is None)
        if operand.low_rank is not None:
            both = [each.low_rank.matrices(torch.float32, transpose=False) for each in (again, operand)]
            assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
            assert (again.low_rank.gain is None) == (operand.low_rank.gain is None)


@pytest.mark.parametrize("settings", [{}, {"refresh_every": 2}, {"refresh_every": 2, "reuse": "factors"}])
def test_unquantised_factors_are_kept_in_memory_of_their_own(settings):
    split = {"rank": 3, "q_factors": "fp32", **settings}
    layer = BitLinear(40, 24, recipe={"base": "nvfp4", "split_input": split, "split_weight": split})
    for _ in range(2):  # found, then taken from the state
        context = layer.context(layer.begin_use(), compute_dtype=torch.float32, needs_grad=True)
        kept = forward_products(
            context, torch.randn(8, 40), layer.weight, None, keeps_input=True, keeps_weight=True
        )
        for role, operand in (("input", kept.input), ("weight", kept.weight)):
            before = layer.split_states[role].state_dict()
            for part in parts_of(operand, is_shared=False):
                part.zero_()
            after = layer.split_states[role].state_dict()
            assert before["directions"].any()
            kept_tensors = [name for name, value in before.items() if isinstance(value, torch.Tensor)]
            assert all(torch.equal(before[name], after[name]) for name in kept_tensors)


def test_shared_parts_are_copied():
    layer = BitLinear(32, 16)
    context = layer.context(layer.begin_use(), compute_dtype=torch.float32, needs_grad=True)
    kept = forward_products(
        context, torch.randn(4, 32), layer.weight, None, keeps_input=True, keeps_weight=True
    ).weight
    own = {part.data_ptr() for part in kept.to_parts()[0]}
    assert not own & {part.data_ptr() for part in parts_of(kept, is_shared=True)}
    assert own == {part.data_ptr() for part in parts_of(kept, is_shared=False)}


def test_masks_of_gradients_have_the_shapes_expected_and_come_back():
    layer = BitLinear(40, 24, recipe=recipe("quartet"))
    x = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(0))
    context = layer.context(layer.begin_use(), compute_dtype=x.dtype, needs_grad=True)
    kept = forward_products(context, x, layer.weight, None, keeps_input=True, keeps_weight=True)
    shapes = {"input": (x.shape, layer.weight.shape), "weight": (layer.weight.shape, x.shape)}
    for name, (own, other) in shapes.items():
        expected = template(layer.recipe, name, layer.sizes, own, x.dtype, other)
        operand = getattr(kept, name)
        parts = parts_of(operand, is_shared=False)
        assert [(p.shape, p.dtype) for p in parts] == [(p.shape, p.dtype) for p in expected.empty_parts(x)]
        again, rest = expected.filled([*parts, torch.zeros(3)])
        assert len(rest) == 1
        assert torch.equal(again.gradient_mask, operand.gradient_mask)
        assert torch.equal(again.tensor.operand(torch.float32), operand.tensor.operand(torch.float32))
        assert torch.equal(again.packed().gradient_mask, operand.gradient_mask)
