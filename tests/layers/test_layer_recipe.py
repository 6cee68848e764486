import json

import pytest

from megalowbit.errors import UserError
from megalowbit.layers.layer_recipe import operand_quantizers
from megalowbit.layers.recipe import Recipe, recipe

MXFP4_BLOCK = {"base": "mxfp4", "gemm": "fp8"}


@pytest.mark.parametrize(
    "block",
    [
        {"base": "nvfp4", "layout": "per_gemm", "hadamard": True},
        {"base": "nvfp4", "q_forward_weight": "nvfp4e2m1bnosr:tile16", "layout": "per_gemm"},
        MXFP4_BLOCK,
        {**MXFP4_BLOCK, "q_backward_input": "fp32"},
        {**MXFP4_BLOCK, "q_forward_input": "mxfp4e2m1bnosr:floor"},
        {"base": "nvfp4", "layout": "per_gemm", "gemm": "fp4"},
        {"base": "mxfp4", "layout": "per_gemm", "gemm": "fp4", "hadamard": True},
        {"base": "nvfp4", "q_backward_outputgrad_for_weight": "int8:sr"},
        {"base": "bf16", "q_backward_outputgrad_for_weight": "int8:sr"},
        {
            "base": "nvfp4",
            "layout": "per_gemm",
            "gemm": "fp4",
            "q_forward_input": "fp32",
            "q_forward_weight": "fp32",
        },
    ],
)
def test_valid_layouts_and_gemms_can_be_rebuilt_from_their_dictionary(block):
    chosen = recipe(block)
    assert Recipe.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen


def test_a_recipe_prints_its_settings_beyond_quantizers():
    text = str(recipe({"base": "mxfp4", "layout": "per_gemm", "hadamard": True, "gemm": "fp8"}))
    assert "one copy for each GEMM; Hadamard transform before grad_weight; GEMMs in fp8" in text
    assert ";" not in str(recipe("nvfp4")).replace("; backward", "")


def test_hadamard_names_products_and_true_is_that_of_the_weights_gradient():
    block = {"base": "nvfp4", "layout": "per_gemm"}
    plain = recipe({**block, "hadamard": True})
    assert plain.transformed_products == ("grad_weight",)
    assert recipe({**block, "hadamard": ["grad_weight"]}) == plain
    assert recipe({**block, "hadamard": []}) == recipe(block)
    both = recipe({**block, "hadamard": ["grad_weight", "output"]})
    assert both.transformed_products == ("output", "grad_weight")
    assert "Hadamard transform before output, grad_weight" in str(both)
    assert both == recipe({**block, "hadamard": ["output", "grad_weight", "output"]})
    assert plain.to_dict()["hadamard"] is True
    assert Recipe.from_dict(json.loads(json.dumps(both.to_dict()))) == both


def test_an_output_gradient_may_be_quantised_only_for_grad_weight():
    plain = recipe("nvfp4")
    assert plain.outputgrad_for_weight == plain.q_backward_outputgrad == "nvfp4e2m1b"
    own = recipe({"base": "nvfp4", "q_backward_outputgrad_for_weight": "int8:sr"})
    assert own.name == "nvfp4 with own q_backward_outputgrad_for_weight"
    assert own.outputgrad_for_weight == "int8:sr"
    assert "grad_output nvfp4e2m1b, grad_output for weight int8:sr)" in str(own)
    same = recipe({"base": "nvfp4", "q_backward_outputgrad_for_weight": "nvfp4e2m1b"})
    assert "for weight" not in str(same) + str(plain)
    assert (
        recipe({"base": own, "q_backward_outputgrad_for_weight": None}).outputgrad_for_weight == "nvfp4e2m1b"
    )
    alone = recipe({"base": "bf16", "q_backward_outputgrad_for_weight": "int8"})
    assert alone.quantizes
    assert operand_quantizers(alone, "grad_weight") == ("int8", "fp32")
    assert operand_quantizers(alone, "grad_input") == operand_quantizers(alone, "output") == ("fp32", "fp32")
    assert operand_quantizers(plain, "grad_weight") == ("nvfp4e2m1b", "nvfp4e2m1bnosr")


@pytest.mark.parametrize(
    ("field", "block", "expected"),
    [
        ("split_input", {"method": "mean"}, "split_input (method mean)"),
        ("split_input", {"method": "mean", "broadcast_dim": 0}, "split_input (method mean, broadcast_dim 0)"),
        ("split_grad_output", {}, "split_grad_output (rank 0.015)"),
        ("split_grad_output", {"method": "svd", "rank": 1.0}, "split_grad_output (method svd, rank 1.0)"),
        (
            "parameter_split",
            {},
            "parameter_split (rank 0.015, warmup_steps 0, merge_steps 0, optimizer_state project)",
        ),
        (
            "parameter_split",
            {"rank": 4, "merge_steps": 7, "merged_lr": 0.5},
            "parameter_split (rank 4, warmup_steps 0, merge_steps 7, optimizer_state project, merged_lr 0.5)",
        ),
    ],
)
def test_a_split_is_printed_with_the_keys_it_reads(field, block, expected):
    assert f"; {expected})" in str(recipe({"base": "nvfp4", field: block}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layout": "per_gem"},
            "recipe 'nvfp4 with own layout': unknown layout 'per_gem': did you mean 'per_gemm'",
        ),
        ({"gemm": "fp16"}, "recipe .*: unknown gemm 'fp16': did you mean"),
        ({"hadamard": 1}, "hadamard must be true, false or a list of products, not 1"),
        ({"hadamard": [["output"]]}, r"unknown product of hadamard \['output'\]"),
        (
            {"hadamard": ["grad_weights"], "layout": "per_gemm"},
            "product of hadamard .*did you mean 'grad_weight'",
        ),
        ({"hadamard": ["output"]}, 'operands of output only, .* set layout to "per_gemm"'),
        (
            {"hadamard": ["grad_input"], "layout": "per_gemm", "q_backward_weight": "fp32"},
            "blocks for q_backward_weight, not 'fp32': choose one, or leave grad_input out of hadamard",
        ),
        ({"hadamard": True}, 'hadamard .* set layout to "per_gemm"'),
        (
            {"hadamard": True, "layout": "per_gemm", "q_backward_input": "fp32"},
            "quantizer with blocks for q_backward_input, not 'fp32'",
        ),
        ({"gemm": "fp8"}, "q_forward_input is 'nvfp4e2m1bnosr': use an mxfp4 quantizer"),
        ({"base": "mxfp4", "gemm": "fp8", "q_forward_weight": "int8b"}, "q_forward_weight is 'int8b'"),
        ({"base": "speculative-int8", "gemm": "fp8"}, "q_forward_input is 'int8e5m2b': use an mxfp4"),
        (
            {"base": "speculative-int8", "gemm": "fp4", "layout": "per_gemm"},
            "output has 'int8e5m2b' and 'int8e5m2b'",
        ),
        ({"base": "speculative-int8", "hadamard": True}, 'set layout to "per_gemm"'),
        ({"base": "bf16", "gemm": "fp8"}, 'gemm "fp8" .* quantises nothing: .*gemm "bf16"'),
        ({"base": "bf16", "gemm": "fp4", "layout": "per_gemm"}, 'gemm "fp4" .* quantises nothing'),
        ({"gemm": "fp4"}, 'set layout to "per_gemm"'),
        (
            {"layout": "per_gemm", "q_backward_outputgrad_for_weight": "int8"},
            'q_backward_outputgrad_for_weight needs layout "single_copy", not "per_gemm": set it to null',
        ),
        (
            {"base": "mxfp4", "gemm": "fp8", "q_backward_outputgrad_for_weight": "mxfp4e2m1b"},
            'q_backward_outputgrad_for_weight needs gemm "bf16", not "fp8": set it to null, or gemm to',
        ),
        (
            {"gemm": "fp4", "layout": "per_gemm", "q_forward_weight": "nvfp4e2m1bnosr:tile16"},
            "output has 'nvfp4e2m1bnosr' and 'nvfp4e2m1bnosr:tile16'",
        ),
        (
            {"gemm": "fp4", "layout": "per_gemm", "q_backward_weight": "mxfp4e2m1bnosr"},
            "grad_input has 'nvfp4e2m1b' and 'mxfp4e2m1bnosr'",
        ),
        (
            {"gemm": "fp4", "layout": "per_gemm", "q_backward_input": "fp32"},
            "grad_weight has 'nvfp4e2m1b' and 'fp32'",
        ),
    ],
)
def test_fields_that_cannot_be_combined_are_rejected_with_the_remedy(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        recipe({"base": "nvfp4", **changes})
    assert "\n" not in str(caught.value)


WRONG = {
    "a share above 1": ({"keep_last": 1.5}, "keep_last = 1.5: expected a number of blocks"),
    "a negative number": ({"keep_first": -1}, "keep_first = -1"),
    "a flag for a number": ({"keep_first": True}, "keep_first = True"),
    "a split of what is not quantised": (
        {"q_backward_outputgrad": "fp32", "split_grad_output": {"rank": 4}},
        "split_grad_output splits an operand that is not quantised",
    ),
    "a split of what neither product quantises": (
        {
            "q_backward_outputgrad": "fp32",
            "q_backward_outputgrad_for_weight": "fp32",
            "split_grad_output": {"rank": 4},
        },
        "q_backward_outputgrad or q_backward_outputgrad_for_weight, or set split_grad_output to null",
    ),
    "two splits of the weight": (
        {"split_weight": {"rank": 4}, "parameter_split": {"rank": 4}},
        "both split the weight",
    ),
    "slices of a weight": ({"split_weight": {"broadcast_dim": 0}}, "split_weight has no slices"),
    "an unknown key of a split": ({"split_input": {"rnak": 4}}, "did you mean 'rank'"),
    "a wrong value of a split": ({"split_input": {"rank": 0}}, "split_input: split rank = 0"),
    "a split that is no object": (
        {"split_input": 60},
        'split_input = 60: expected an object such as {"rank"',
    ),
    "an unknown format of factors": ({"split_input": {"q_factors": "nvfp5"}}, "nvfp5"),
    "an unknown gain": ({"split_input": {"gains": "yshe"}}, "ysche"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_invalid_fields_are_rejected_by_name(changes, message):
    with pytest.raises(UserError) as caught:
        recipe({"base": "nvfp4", **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gradient_that_one_product_quantises_may_be_split():
    block = {"q_backward_outputgrad": "fp32", "q_backward_outputgrad_for_weight": "int8"}
    assert recipe({"base": "nvfp4", **block, "split_grad_output": {"rank": 4}}).split_grad_output.rank == 4


def test_a_recipe_that_quantises_nothing_cannot_split_parameters():
    with pytest.raises(UserError, match="parameter_split needs quantised layers"):
        recipe({"base": "bf16", "parameter_split": {"rank": 4}})
