import pytest

from megalowbit.errors import UserError
from megalowbit.layers.recipe import OPERAND_FIELDS, Recipe, recipe, recipes


def test_named_recipes_are_what_they_say():
    nvfp4, bf16 = recipe("nvfp4"), recipe("bf16")
    assert nvfp4.q_backward_outputgrad == "nvfp4e2m1b"
    assert {getattr(nvfp4, field) for field in OPERAND_FIELDS[:4]} == {"nvfp4e2m1bnosr"}
    assert nvfp4.quantizes
    assert not bf16.quantizes
    assert set(recipes()) == {"nvfp4", "bf16"}


@pytest.mark.parametrize("name", ["nvfp4", "bf16"])
def test_a_recipe_survives_its_dictionary(name):
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
        ({"base": "nvfp4", "name": ""}, "name must be a non-empty string"),
        ({"q_forward_input": "fp32"}, "lacks q_forward_weight"),
    ],
)
def test_wrong_recipes_are_refused_in_one_line(value, message):
    with pytest.raises(UserError, match=message) as caught:
        recipe(value)
    assert "\n" not in str(caught.value)


def test_recipes_are_frozen_and_printable():
    with pytest.raises(AttributeError):
        recipe("nvfp4").name = "other"
    assert "grad_output nvfp4e2m1b" in str(recipe("nvfp4"))
    recipes().clear()
    assert recipes()
