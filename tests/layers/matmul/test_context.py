import pytest
import torch

from megalowbit.layers.matmul.context import Call, Prepared, keeps_weight_codes
from megalowbit.layers.matmul.weight_cache import WeightSlot
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream

X = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))


def call_with(chosen="nvfp4", **kwargs):
    stream = RandomStream(2)
    return Call(
        recipe=recipe(chosen),
        compute_dtype=torch.float32,
        random_key=lambda role, device: stream.key("layer", role),
        **kwargs,
    )


def test_an_operand_is_drawn_with_the_key_of_its_role():
    call = call_with()
    expected = quantizer("nvfp4e2m1b").quantize(X, random_key=RandomStream(2).key("layer", "grad_output"))
    assert torch.equal(call.quantize(Prepared(X), "nvfp4e2m1b", "grad_output").tensor.codes, expected.codes)
    assert not torch.equal(call.quantize(Prepared(X), "nvfp4e2m1b", "input").tensor.codes, expected.codes)


def test_nearest_rounding_and_empty_tensors_ask_for_no_key():
    call = Call(recipe=recipe("nvfp4"), compute_dtype=torch.float32, random_key=None)
    call.quantize(Prepared(X), "nvfp4e2m1bnosr", "input")
    call.quantize(Prepared(X[:0]), "nvfp4e2m1b", "input")


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
    call = call_with(observe=lambda *args: seen.append(args), is_replay=is_replay)
    call.quantize(Prepared(X), "nvfp4e2m1bnosr", role)
    assert [args[0] for args in seen] == ([role] if is_reported else [])


def test_what_is_not_quantised_is_not_reported():
    seen = []
    call_with(observe=lambda *args: seen.append(args)).quantize(Prepared(X), "fp32", "input")
    assert not seen


@pytest.mark.parametrize("is_transformed", [False, True])
def test_the_transform_applies_where_recipe_and_operand_say_so(is_transformed):
    block = {"base": "nvfp4", "layout": "per_gemm", "hadamard": True}
    call = call_with(block, hadamard_signs=0b1011)
    got = call.quantize_transposed(
        Prepared(X), "nvfp4e2m1bnosr", "backward_input", is_transformed=is_transformed
    )
    expected = quantizer("nvfp4e2m1bnosr").quantize_transposed(X, signs=0b1011 if is_transformed else None)
    assert got.is_transposed
    assert torch.equal(got.tensor.codes, expected.codes)


@pytest.mark.parametrize(("name", "times"), [("nvfp4e2m1bnosr", 1), ("nvfp4e2m1b", 2), ("fp32", 2)])
def test_weights_are_kept_where_their_rounding_does_not_change(name, times):
    made = []
    call = call_with(weights=WeightSlot())
    for _ in range(2):
        call.weight(X, name, "weight", lambda: made.append(1) or call.quantize(Prepared(X), name, "weight"))
    assert len(made) == times


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
    assert keeps_weight_codes(recipe(block)) is expected


@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr", "nvfp4e2m1b:seed_compat", "fp4e2m1:seed_compat"])
def test_a_transposed_operand_is_counted_whatever_its_quantiser(name):
    seen, x = [], X[:16]
    call = call_with(observe=lambda *args: seen.append(args))
    call.quantize_transposed(Prepared(x), name, "grad_output_transposed", is_transformed=False)
    assert not seen
    call.quantize_transposed(
        Prepared(x), name, "grad_output_transposed", is_transformed=False, reported_as="grad_output"
    )
    ((role, counts, error),) = seen
    assert role == "grad_output"
    assert counts[0] == x.numel()
    assert float(error[1]) == pytest.approx(x.double().square().sum().item(), rel=1e-6)
