import copy
import dataclasses
import json
import pickle

import pytest

from megalowbit.errors import UserError
from megalowbit.layers.layer_recipe import OPERAND_FIELDS
from megalowbit.layers.recipe import Recipe, recipe, recipe_over, recipes
from megalowbit.spectral.settings import OperandSplit


def test_named_recipes_have_the_documented_fields():
    nvfp4, bf16 = recipe("nvfp4"), recipe("bf16")
    assert nvfp4.q_backward_outputgrad == "nvfp4e2m1b"
    assert {getattr(nvfp4, field) for field in OPERAND_FIELDS[:4]} == {"nvfp4e2m1bnosr"}
    assert nvfp4.quantizes
    assert not bf16.quantizes
    assert list(recipes())[:8] == [
        "nvfp4", "mxfp4", "nvidia-nvfp4", "metis-nvfp4", "metis-seed", "fp8", "speculative-int8", "bf16"
    ]  # fmt: skip


def test_the_speculative_int8_recipe_rounds_only_gradients_stochastically():
    mixed = recipe("speculative-int8")
    assert mixed.q_backward_outputgrad == "int8e5m2b:sr"
    assert {getattr(mixed, field) for field in OPERAND_FIELDS[:4]} == {"int8e5m2b"}


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "bf16", "speculative-int8"])
def test_a_recipe_can_be_rebuilt_from_its_dictionary(name):
    assert Recipe.from_dict(recipe(name).to_dict()) == recipe(name)


def test_a_block_overrides_its_base_and_is_named_after_it():
    own = recipe({"base": "nvfp4", "q_forward_weight": "fp32", "keep": ["*.h.0.*"]})
    assert own.q_forward_weight == "fp32"
    assert own.q_forward_input == "nvfp4e2m1bnosr"
    assert own.keep == ("*.h.0.*",)
    assert own.name == "nvfp4 with own q_forward_weight, keep"
    assert recipe({"base": "nvfp4"}) == recipe("nvfp4")
    assert recipe({"base": "nvfp4", "name": "mine"}).name == "mine"
    assert recipe(own) is own


def test_a_split_drops_keys_of_its_base_that_its_method_does_not_read():
    mean = recipe({"base": "metis-seed", "split_grad_output": {"method": "mean"}})
    assert mean.split_grad_output == OperandSplit(method="mean")
    exact = recipe({"base": "metis-seed", "split_grad_output": {"method": "svd"}}).split_grad_output
    assert (exact.rank, exact.order, exact.niter) == (60, "seed", OperandSplit().niter)
    assert recipe({"base": "metis-seed", "split_grad_output": {"rank": 64}}).split_grad_output.niter == 0
    with pytest.raises(
        UserError, match=r'^split_grad_output: split niter = 5 has no effect with method "mean"'
    ):
        recipe({"base": "metis-seed", "split_grad_output": {"method": "mean", "niter": 5}})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nvfp5", "unknown recipe 'nvfp5': did you mean 'nvfp4'"),
        (4, "unknown recipe 4"),
        ({"base": "nvfp5"}, "unknown recipe"),
        ({"base": "nvfp4", "q_forward_wieght": "fp32"}, "did you mean 'q_forward_weight'"),
        ({"base": "nvfp4", "q_forward_weight": "fp3"}, "unknown quantizer 'fp3'"),
        ({"base": "nvfp4", "q_forward_weight": None}, "q_forward_weight must be a quantizer name, not None"),
        ({"base": "nvfp4", "keep": "lm_head"}, "keep must be a list"),
        ({"base": "nvfp4", "keep": [3]}, "keep holds 3"),
        ({"base": "nvfp4", "keep_if_present": [""]}, "keep_if_present holds ''"),
        ({"base": "nvfp4", "name": ""}, "name must be a non-empty string"),
        ({"q_forward_input": "fp32"}, "lacks q_forward_weight"),
        (
            {"base": "nvfp4", "q_backward_outputgrad_for_weight": 8},
            "q_backward_outputgrad_for_weight must be a quantizer name, not 8",
        ),
        ({"base": "nvfp4", "q_backward_outputgrad_for_weight": "int9"}, "unknown quantizer 'int9'"),
    ],
)
def test_wrong_recipes_are_rejected_in_one_line(value, message):
    with pytest.raises(UserError, match=message) as caught:
        recipe(value)
    assert "\n" not in str(caught.value)


def test_recipes_are_frozen_and_printable():
    with pytest.raises(AttributeError):
        recipe("nvfp4").name = "other"
    assert "grad_output nvfp4e2m1b" in str(recipe("nvfp4"))
    recipes().clear()
    assert recipes()


def test_the_mxfp4_recipe_rounds_gradients_stochastically():
    mxfp4 = recipe("mxfp4")
    assert mxfp4.q_backward_outputgrad == "mxfp4e2m1b"
    assert {getattr(mxfp4, field) for field in OPERAND_FIELDS[:4]} == {"mxfp4e2m1bnosr"}


def test_keys_left_out_of_a_split_come_from_the_base():
    wider = recipe({"base": "metis-seed", "split_grad_output": {"rank": 64}})
    assert wider.split_grad_output.rank == 64
    assert wider.split_grad_output.order == "seed"
    assert wider.split_grad_output.niter == 0
    assert wider.name == "metis-seed with own split_grad_output"
    assert recipe({"base": "metis-seed", "split_grad_output": {"rank": 60}}) == recipe("metis-seed")


def test_a_split_of_the_base_can_be_removed():
    assert recipe({"base": "metis-seed", "split_grad_output": None}).split_grad_output is None


@pytest.mark.parametrize("name", ["metis-seed", "metis-nvfp4", "nvidia-nvfp4"])
def test_recipes_with_splits_can_be_rebuilt_from_json(name):
    import json

    block = json.loads(json.dumps(recipe(name).to_dict()))
    assert recipe(block) == recipe(name)


def test_a_conversion_report_describes_the_splits():
    text = str(recipe("metis-seed"))
    assert "split_grad_output (method svd_lowrank, rank 60, niter 0, order seed" in text


@pytest.mark.parametrize("name", ["nvfp4", "metis-qb", "quartet"])
def test_copies_and_pickles_are_equal(name):
    original = recipe(name)
    copies = [copy.copy(original), copy.deepcopy(original), dataclasses.replace(original)]
    copies += [pickle.loads(pickle.dumps(original, each)) for each in range(pickle.HIGHEST_PROTOCOL + 1)]
    for each in copies:
        assert each == original
        assert hash(each) == hash(original)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Recipe, r"^recipe block lacks name, q_forward_input, .*: add them, or a base \("),
        (lambda: Recipe.from_dict(None), r"^a recipe block must be a mapping, not None"),
        (lambda: Recipe.from_dict([1]), r"^a recipe block must be a mapping, not \[1\]"),
    ],
)
def test_a_recipe_of_nothing_is_refused_in_one_line(make, message):
    with pytest.raises(UserError, match=message) as found:
        make()
    assert "\n" not in str(found.value)


OWN = {"*.mlp.*": "mxfp4", "*.c_proj": {"q_forward_input": "fp8e4m3"}, "*.h.0": "bf16"}


def test_the_first_pattern_that_matches_gives_a_layer_its_recipe():
    whole = recipe({"base": "nvfp4", "keep_last": 1, "layers": OWN})
    assert whole.of_layer("transformer.h.1.mlp.c_proj") == recipe("mxfp4")
    projection = whole.of_layer("transformer.h.1.attn.c_proj")
    assert (projection.q_forward_input, projection.q_forward_weight) == ("fp8e4m3", "nvfp4e2m1bnosr")
    assert (projection.name, projection.keep_last, projection.layers) == (
        "own q_forward_input fp8e4m3",
        0,
        (),
    )
    assert whole.of_layer("transformer.h.0.attn.c_attn") == recipe("bf16")
    assert whole.of_layer("transformer.h.1.attn.c_attn") == whole.alone
    assert whole.alone == dataclasses.replace(recipe("nvfp4"), name=whole.name, keep_last=1)
    assert whole.variants == (whole.alone, recipe("mxfp4"), projection, recipe("bf16"))


def test_a_recipe_with_recipes_of_single_layers_can_be_rebuilt_copied_and_printed():
    whole = recipe({"base": "metis-nvfp4", "layers": OWN | {"*.c_attn": {"split_input": None}}})
    again = recipe(json.loads(json.dumps(whole.to_dict())))
    assert again == whole
    assert hash(again) == hash(whole)
    assert again.variants == whole.variants
    assert pickle.loads(pickle.dumps(whole)) == copy.deepcopy(whole) == whole
    assert whole != recipe({"base": "metis-nvfp4", "layers": OWN, "name": whole.name})
    assert str(whole).endswith(
        "; other recipes: *.mlp.*: mxfp4, *.c_proj: own q_forward_input fp8e4m3, *.h.0: bf16, "
        "*.c_attn: own split_input null)"
    )


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"split_weight": {"rank": 8}}, "own split_weight (rank 8)"),
        ({"split_weight": {"rank": 8, "niter": 1}}, "own split_weight (rank 8, niter 1)"),
        (
            {"q_backward_outputgrad": "fp32", "hadamard": False},
            "own q_backward_outputgrad fp32, hadamard false",
        ),
        ({"layout": "per_gemm", "hadamard": True}, "own layout per_gemm, hadamard true"),
        (
            {"layout": "per_gemm", "hadamard": ["output", "grad_weight"]},
            "own layout per_gemm, hadamard output+grad_weight",
        ),
        ({"q_forward_input": "fp32", "name": "mine"}, "mine"),
        ({"q_forward_input": "fp32", "if_present": True}, "own q_forward_input fp32"),
        ({}, "nvfp4"),
    ],
)
def test_the_name_of_a_block_for_a_layer_tells_its_values(block, name):
    assert recipe_over(recipe("nvfp4"), block).name == name


def test_a_recipe_quantises_if_one_of_its_layers_does():
    assert recipe({"base": "bf16", "layers": {"*.mlp": "nvfp4"}}).quantizes
    assert recipe({"base": "nvfp4", "layers": {"*": "bf16"}}).quantizes
    assert not recipe({"base": "bf16", "layers": {"*": "bf16"}}).quantizes


def test_what_a_named_recipe_keeps_has_no_effect_on_a_layer():
    assert recipe("nvidia-nvfp4").keep_last > 0
    whole = recipe({"base": "nvfp4", "layers": {"*.mlp": "nvidia-nvfp4"}})
    changed = dataclasses.replace(recipe("nvidia-nvfp4"), keep_last=0)
    assert whole.of_layer("h.0.mlp") == changed


def test_a_split_of_parameters_is_that_of_all_layers_that_quantise():
    split = {"rank": 8, "warmup_steps": 2}
    whole = recipe({"base": "nvfp4", "parameter_split": split, "layers": {"*.mlp": "mxfp4", "*.h.0": "bf16"}})
    assert whole.of_layer("a.mlp").parameter_split == whole.parameter_split
    assert whole.of_layer("a.h.0").parameter_split is None
    assert recipe(whole.to_dict()) == whole
    with pytest.raises(
        UserError, match=r"layers\['\*'\]: parameter_split is of the whole model, not of single"
    ):
        recipe({"base": "nvfp4", "layers": {"*": {"parameter_split": split}}})
    with pytest.raises(UserError, match="parameter_split is the same for all layers"):
        recipe({"base": "nvfp4", "layers": {"*": dataclasses.replace(whole.alone)}})


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("nvfp4", r"layers must give a recipe for each pattern, not be 'nvfp4': write \{\"\*\.mlp\.\*\": "),
        (None, "layers must give a recipe for each pattern, not be None"),
        ([1], "layers must give a recipe for each pattern"),
        ([["*.mlp", "fp8"], ["*.mlp", "nvfp4"]], r"layers: '\*.mlp' occurs twice: remove one"),
        ({"": "nvfp4"}, "layers: '' is no pattern of module names"),
        ({"*": "nvpf4"}, r"layers\['\*'\]: unknown recipe 'nvpf4': did you mean 'nvfp4'"),
        ({"*": 3}, r"layers\['\*'\]: unknown recipe 3"),
        ({"*": {"keep": ["*"]}}, r"layers\['\*'\]: keep is of the whole model, not of single layers"),
        ({"*": {"layers": {}}}, r"layers\['\*'\]: layers cannot be nested: give their patterns a place in"),
        ({"*": {"q_forward_weights": "fp32"}}, "did you mean 'q_forward_weight'"),
        ({"*": recipe({"base": "nvfp4", "layers": {"*": "bf16"}})}, "has layers of its own"),
        ({"*": {"base": {"base": "nvfp4", "layers": {"*": "bf16"}}}}, r"layers\['\*'\]: layers cannot be"),
        ({"*": {"base": {"base": "mxfp4", "keep": ["head"]}}}, r"layers\['\*'\]: keep is of the whole model"),
        ({"*": {"hadamard": True}}, r"layers\['\*'\]: recipe 'own hadamard': hadamard transforms"),
    ],
)
def test_wrong_recipes_of_single_layers_are_refused_in_one_line(layers, message):
    with pytest.raises(UserError, match=message) as raised:
        recipe({"base": "nvfp4", "layers": layers})
    assert "\n" not in str(raised.value)


def test_all_wrong_recipes_of_single_layers_are_named():
    with pytest.raises(UserError) as raised:
        recipe({"base": "nvfp4", "layers": {"*.mlp": "nvpf4", "*.attn": "mxpf4"}})
    assert "layers['*.mlp']: unknown recipe 'nvpf4'" in str(raised.value)
    assert "layers['*.attn']: unknown recipe 'mxpf4'" in str(raised.value)


def test_a_split_of_parameters_may_be_of_the_layers_that_a_recipe_names_only():
    split = {"rank": 8, "warmup_steps": 2}
    whole = recipe({"base": "bf16", "parameter_split": split, "layers": {"*.mlp": "nvfp4"}})
    assert whole.alone.parameter_split is None
    assert whole.of_layer("a.mlp").parameter_split == whole.parameter_split
    assert whole.parameter_split is not None
    assert recipe(whole.to_dict()) == whole == pickle.loads(pickle.dumps(whole))
    with pytest.raises(UserError, match="parameter_split needs quantised layers"):
        recipe({"base": "bf16", "parameter_split": split, "layers": {"*.mlp": "bf16"}})
    with pytest.raises(UserError, match="split_weight and parameter_split both split the weight"):
        recipe({"base": "metis-qb", "parameter_split": split, "layers": {"*.mlp": "nvfp4"}})


def test_a_block_over_a_recipe_with_layers_changes_the_split_of_all_of_them():
    inner = {"base": "nvfp4", "parameter_split": {"rank": 8, "warmup_steps": 2}, "layers": {"*.mlp": "mxfp4"}}
    without = recipe({"base": inner, "parameter_split": None})
    assert without.of_layer("a.mlp") == recipe("mxfp4")
    assert without.alone.parameter_split is None
    other = recipe({"base": inner, "parameter_split": {"rank": 4, "warmup_steps": 2}})
    assert other.of_layer("a.mlp").parameter_split.rank == other.alone.parameter_split.rank == 4


def test_an_empty_block_exempts_layers_from_later_patterns():
    whole = recipe({"base": "nvidia-nvfp4", "layers": {"*.h.0": {}, "*": "mxfp4"}})
    expected = dataclasses.replace(recipe("nvidia-nvfp4"), keep_last=0, keep_first=0, name=whole.name)
    assert dataclasses.replace(whole.of_layer("a.h.0"), keep=()) == dataclasses.replace(expected, keep=())
    assert whole.of_layer("a.h.1") == recipe("mxfp4")


def test_a_recipe_that_no_layer_can_have_is_no_variant():
    whole = recipe({"base": "quartet", "layers": {"*.h.0": "mxfp4", "*": "nvfp4"}})
    assert whole.variants == (recipe("mxfp4"), recipe("nvfp4"))


@pytest.mark.parametrize("layers", [{"*.mlp": "nvfp4"}, [1], 5, "nvfp4"])
def test_mistakes_beside_layers_are_reported_first(layers):
    with pytest.raises(UserError, match='gemm "fp8" multiplies quantised operands, but the recipe quantises'):
        recipe({"base": "bf16", "gemm": "fp8", "layers": layers})


def test_a_pattern_for_several_families_says_so():
    shipped = recipe("nvfp4-first-block-fp8")
    assert {(each.name, each.if_present) for _, each in shipped.layers} == {("fp8", True)}
    assert recipe(json.loads(json.dumps(shipped.to_dict()))) == shipped
    assert shipped.to_dict()["layers"]["*.h.0.mlp.c_*"]["if_present"] is True
    assert "if_present" not in shipped.to_dict()
    assert shipped.of_layer("transformer.h.0.mlp.c_fc") == recipe("fp8") == shipped.variants[1]
    with pytest.raises(UserError, match="if_present must be true or false, not 'yes'"):
        recipe({"base": "nvfp4", "layers": {"*.h.0": {"base": "fp8", "if_present": "yes"}}})


SHIPPED = ["h.0.attn.c_proj", "h.0.mlp.c_*", "*.h.0.attn.c_proj", "*.h.0.mlp.c_*"]  # of the default


def test_patterns_of_the_base_come_after_own_ones():
    own = recipe({"base": "nvfp4-first-block-fp8", "layers": {"*.h.3": "bf16", "*.h.0.mlp": "mxfp4"}})
    assert [pattern for pattern, _ in own.layers] == ["*.h.3", "*.h.0.mlp", *SHIPPED]
    assert own.of_layer("transformer.h.0.attn.c_proj").name == "fp8"
    assert own.of_layer("transformer.h.0.mlp.c_fc").name == "mxfp4"
    replaced = recipe({"base": own, "layers": [["*.h.0", "nvfp4"], ["*.h.1", "fp8"]]})
    assert [pattern for pattern, _ in replaced.layers] == ["*.h.0", "*.h.1", "*.h.3", "*.h.0.mlp", *SHIPPED]
    assert replaced.of_layer("transformer.h.0.mlp.c_fc").name == "nvfp4"
    again = recipe({"base": own, "layers": {"*.h.3": "fp8"}})
    assert [pattern for pattern, _ in again.layers] == ["*.h.3", "*.h.0.mlp", *SHIPPED]
    assert again.of_layer("transformer.h.3.mlp.c_fc").name == "fp8"
    assert recipe({"base": own, "layers": {}}).layers == own.layers
    assert recipe({"base": own, "keep_last": 1}).layers == own.layers
