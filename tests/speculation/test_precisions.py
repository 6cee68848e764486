import itertools
import re
from dataclasses import fields, replace

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.layers.conversion.precision_switch import switched
from megalowbit.layers.layer_recipe import operand_quantizers
from megalowbit.layers.recipe import Recipe, recipe, recipes
from megalowbit.quantize.names import quantizer
from megalowbit.spectral.settings import OperandSplit, ParameterSplit
from megalowbit.speculation.precisions import (
    OPERANDS,
    PRECISIONS,
    PRODUCTS,
    Precision,
    check_base,
    operand_quantizer,
    recipe_with,
)
from megalowbit.speculation.settings import BITS

NAMES = ("int4", "nvfp4", "int8", "mixed", "fp8", "bf16")
CHOICES = list(itertools.product(NAMES, repeat=3))


def names_of(precision, product):
    """Names of the left and the right operand's quantizer: outputs have no gradient among their operands."""
    operand, gradient = PRECISIONS[precision]
    return (operand if product == "output" else gradient), operand


def test_settings_list_the_same_candidates_in_the_same_order():
    assert tuple(BITS) == tuple(PRECISIONS) == NAMES


def test_codes_have_the_bits_of_their_candidate():
    x = torch.linspace(-1, 1, 2**12).reshape(32, 128)
    for candidate, names in PRECISIONS.items():
        for name in names:
            if candidate == "bf16":
                assert quantizer(name).is_identity
            else:
                assert 8 * quantizer(name).quantize(x).codes.nbytes == BITS[candidate] * x.numel(), name


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_rounded_without_bias(name):
    candidate = PRECISIONS[name]
    operand, gradient = quantizer(candidate.operand), quantizer(candidate.gradient)
    assert not operand.is_stochastic
    assert gradient.is_stochastic == (name != "bf16")
    if name == "fp8":
        assert (candidate.operand, candidate.gradient) == ("fp8e4m3", "fp8e5m2:sr")  # gradients need range


def test_quantizers_stand_in_the_order_of_operands():
    assert {product: OPERANDS[product] for product in PRODUCTS} == {
        "output": ("input", "weight"),
        "grad_input": ("grad_output", "weight"),
        "grad_weight": ("grad_output", "input"),
    }
    in_fp8 = [operand_quantizer("fp8", operand) for operand in ("input", "weight", "grad_output")]
    assert in_fp8 == ["fp8e4m3", "fp8e4m3", "fp8e5m2:sr"]
    for name, product in itertools.product(NAMES, PRODUCTS):
        found = tuple(operand_quantizer(name, operand) for operand in OPERANDS[product])
        assert found == names_of(name, product)


@pytest.mark.parametrize("base", ["fp8", "nvfp4", "mxfp4"])
def test_each_product_gets_its_own_precision_whatever_the_others_have(base):
    for choice in CHOICES:
        chosen = recipe_with(recipe(base), choice)
        for product, name in zip(PRODUCTS, choice, strict=True):
            assert operand_quantizers(chosen, product) == names_of(name, product), (choice, product)


def test_a_gradient_with_one_quantizer_for_both_products_is_quantised_once():
    for choice in CHOICES:
        own = recipe_with(recipe("fp8"), choice).q_backward_outputgrad_for_weight
        gradients = [PRECISIONS[name].gradient for name in choice[1:]]
        assert own == (None if gradients[0] == gradients[1] else gradients[1])


def test_all_but_quantizers_and_name_stays():
    base = replace(recipe("nvfp4"), keep=("*.h.0.*",), keep_first=1, keep_last=0.25)
    chosen = recipe_with(base, ("int8", "fp8", "bf16"))
    assert chosen.name == "nvfp4, int8/fp8/bf16"
    changed = {each.name for each in fields(Recipe) if getattr(chosen, each.name) != getattr(base, each.name)}
    assert changed <= {"name"} | {each.name for each in fields(Recipe) if each.name.startswith("q_")}


@pytest.mark.parametrize("scope", ["forward", "all"])
def test_what_a_late_switch_left_in_high_precision_stays_so(scope):
    base = switched(recipe("fp8"), scope)
    for choice in CHOICES:
        chosen = recipe_with(base, choice)
        assert operand_quantizers(chosen, "output") == ("fp32", "fp32")
        for product, name in zip(PRODUCTS[1:], choice[1:], strict=True):
            wanted = names_of(name, product) if scope == "forward" else ("fp32", "fp32")
            assert operand_quantizers(chosen, product) == wanted


@pytest.mark.parametrize("unquantised", [each.name for each in fields(Recipe) if each.name.startswith("q_")])
def test_one_operand_in_high_precision_stays_so_alone(unquantised):
    """Slots by (product, place), told apart by hand: two of them share a field only for the gradient."""
    slots = {
        "q_forward_input": [("output", 0)],
        "q_forward_weight": [("output", 1)],
        "q_backward_weight": [("grad_input", 1)],
        "q_backward_input": [("grad_weight", 1)],
        "q_backward_outputgrad": [("grad_input", 0), ("grad_weight", 0)],
        "q_backward_outputgrad_for_weight": [("grad_weight", 0)],
    }[unquantised]
    base = replace(recipe("nvfp4"), **{unquantised: "fp32"})
    for choice in CHOICES:
        chosen = recipe_with(base, choice)
        for product, name in zip(PRODUCTS, choice, strict=True):
            wanted = [
                "fp32" if (product, place) in slots else names_of(name, product)[place] for place in (0, 1)
            ]
            assert list(operand_quantizers(chosen, product)) == wanted, (choice, product)


def test_a_gradient_left_alone_for_one_product_stays_so_for_the_other_way_round():
    base = replace(recipe("nvfp4"), q_backward_outputgrad="fp32", q_backward_outputgrad_for_weight="int8")
    chosen = recipe_with(base, ("int8", "int8", "int8"))
    assert operand_quantizers(chosen, "grad_input") == ("fp32", "int8")
    assert operand_quantizers(chosen, "grad_weight") == ("int8:sr", "int8")


def test_equal_choices_give_the_same_object():
    first = recipe_with(recipe("fp8"), ("int8", "int8", "bf16"))
    assert recipe_with(recipe("fp8"), ["int8", "int8", "bf16"]) is first
    assert recipe_with(recipe("nvfp4"), ("int8", "int8", "bf16")) is not first


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: recipe_with(recipe("fp8"), ("int8", "int9", "bf16")),
            "unknown precision 'int9': did you mean",
        ),
        (
            lambda: recipe_with(recipe("fp8"), ("int8", "bf16")),
            "a precision for each of output, grad_input, ",
        ),
        (lambda: operand_quantizer("int9", "input"), "unknown precision 'int9'"),
    ],
)
def test_unknown_names_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_bases_of_one_format_are_accepted():
    for name in ("nvfp4", "mxfp4", "fp8"):
        check_base(recipe(name))
    check_base(switched(recipe("fp8"), "forward"))  # backward still quantises
    check_base(recipe_with(recipe("fp8"), ("int8", "bf16", "int8")))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (
            lambda: recipe("bf16"),
            'it quantises nothing; set recipe to "speculative-int8", or leave speculation',
        ),
        (
            lambda: recipe("metis-nvfp4"),
            "split_input splits an operand; set split_input to null",
        ),
        (lambda: replace(recipe("nvfp4"), split_weight=OperandSplit(rank=4)), "set split_weight to null"),
        (
            lambda: replace(recipe("nvfp4"), split_grad_output=OperandSplit(rank=4)),
            "set split_grad_output to",
        ),
        (
            lambda: replace(recipe("nvfp4"), parameter_split=ParameterSplit(rank=4)),
            "set parameter_split to null",
        ),
        (lambda: recipe("nvidia-nvfp4"), 'set hadamard to false and layout to "single_copy"'),
        (lambda: replace(recipe("nvfp4"), layout="per_gemm"), "layout 'per_gemm' needs .*; set layout to"),
        (lambda: replace(recipe("mxfp4"), gemm="fp8"), "gemm 'fp8' supports one format only; set gemm to"),
        (
            lambda: replace(recipe("metis-seed"), split_grad_output=None),
            "q_forward_input = 'fp4e2m1b:seed_compat' uses the arithmetic of another .* choose another",
        ),
        (
            lambda: replace(recipe("fp8"), q_backward_outputgrad_for_weight="fp4e2m1b:seed_compat"),
            "q_backward_outputgrad_for_weight = 'fp4e2m1b:seed_compat' uses the arithmetic",
        ),
    ],
)
def test_other_bases_are_refused_in_one_line(base, message):
    refused = base()
    with pytest.raises(UserError, match=message) as caught:
        check_base(refused)
    text = str(caught.value)
    assert text.startswith(f"speculation cannot choose precisions for recipe {refused.name!r}: ")
    assert "\n" not in text


def test_the_remedy_names_a_recipe_that_there_is_and_that_works():
    with pytest.raises(UserError) as caught:
        check_base(recipe("bf16"))
    named = re.search(r'set recipe to "([^"]+)"', str(caught.value)).group(1)
    check_base(recipes()[named])


def test_precisions_are_plain_values():
    assert PRECISIONS["int8"] == Precision(operand="int8", gradient="int8:sr")
    with pytest.raises(AttributeError):
        PRECISIONS["int8"].operand = "int4"
    with pytest.raises(TypeError):
        PRECISIONS["int8"] = PRECISIONS["int4"]
