import pytest
import torch

from megalowbit.layers.matmul.context import MatmulContext, SplitOperand
from megalowbit.layers.matmul.quantizations import Quantization
from megalowbit.layers.matmul.weight_cache import WeightSlot
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream

X = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))


def context_with(chosen="nvfp4", **kwargs):
    stream = RandomStream(2)
    return MatmulContext(
        recipe=recipe(chosen),
        compute_dtype=torch.float32,
        random_key=lambda role, device: stream.key("layer", role),
        **kwargs,
    )


def quantization(role, name="nvfp4e2m1bnosr", **kwargs):
    return Quantization(role, name, "q_of_a_test", **kwargs)


def test_an_operand_is_drawn_with_the_key_of_its_role():
    context = context_with()

    def drawn_as(role):
        return context.quantize(SplitOperand(X), quantization(role, "nvfp4e2m1b")).tensor.codes

    expected = quantizer("nvfp4e2m1b").quantize(X, random_key=RandomStream(2).key("layer", "grad_output"))
    assert torch.equal(drawn_as("grad_output"), expected.codes)
    assert not torch.equal(drawn_as("input"), expected.codes)


def test_nearest_rounding_and_empty_tensors_ask_for_no_key():
    context = MatmulContext(recipe=recipe("nvfp4"), compute_dtype=torch.float32, random_key=None)
    context.quantize(SplitOperand(X), quantization("input"))
    context.quantize(SplitOperand(X[:0]), quantization("input", "nvfp4e2m1b"))


@pytest.mark.parametrize(
    ("role", "is_replay", "is_reported"),
    [
        ("input", False, True),
        ("weight", False, True),
        ("grad_output", False, True),
        ("input", True, False),
        ("weight", True, False),
        ("grad_output", True, True),
        ("backward_input", False, False),
        ("backward_weight", False, False),
    ],
)
def test_each_tensor_is_reported_once(role, is_replay, is_reported):
    seen = []
    context = context_with(observe=lambda *args: seen.append(args), is_replay=is_replay)
    context.quantize(SplitOperand(X), quantization(role))
    assert [args[0] for args in seen] == ([role] if is_reported else [])


def test_what_is_not_quantised_is_not_reported():
    seen = []
    context_with(observe=lambda *args: seen.append(args)).quantize(
        SplitOperand(X), quantization("input", "fp32")
    )
    assert not seen


@pytest.mark.parametrize("is_transformed", [False, True])
def test_the_transform_applies_where_recipe_and_operand_say_so(is_transformed):
    block = {"base": "nvfp4", "layout": "per_gemm", "hadamard": True}
    context = context_with(block, hadamard_signs=0b1011)
    asked = quantization("backward_input", is_transposed=True, is_transformed=is_transformed)
    got = context.quantize(SplitOperand(X), asked)
    expected = quantizer("nvfp4e2m1bnosr").quantize_transposed(X, signs=0b1011 if is_transformed else None)
    assert got.is_transposed
    assert torch.equal(got.tensor.codes, expected.codes)


@pytest.mark.parametrize(("name", "times"), [("nvfp4e2m1bnosr", 1), ("nvfp4e2m1b", 2), ("fp32", 2)])
def test_weights_are_kept_where_their_rounding_does_not_change(name, times):
    made, asked = [], quantization("weight", name)
    context = context_with(weights=WeightSlot())
    for _ in range(2):
        context.weight(X, asked, lambda: made.append(1) or context.quantize(SplitOperand(X), asked))
    assert len(made) == times


@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "nvfp4e2m1b:seed_compat", "fp4e2m1:seed_compat"])
def test_a_transposed_operand_is_counted_whatever_its_quantizer(name):
    seen, x = [], X[:16]
    context = context_with(observe=lambda *args: seen.append(args))
    asked = quantization("grad_output_transposed", name, is_transposed=True)
    context.quantize(SplitOperand(x), asked, is_reported=False)
    assert not seen
    context.quantize(SplitOperand(x), asked)
    ((role, counts, error),) = seen
    assert role == "grad_output"
    assert counts[0] == x.numel()
    assert float(error[1]) == pytest.approx(x.double().square().sum().item(), rel=1e-6)
