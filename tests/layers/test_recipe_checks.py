import pytest

from megalowbit.errors import UserError
from megalowbit.layers.recipe import recipe

WRONG = {
    "a share above 1": ({"keep_last": 1.5}, "keep_last = 1.5: expected a number of blocks"),
    "a negative number": ({"keep_first": -1}, "keep_first = -1"),
    "a flag for a number": ({"keep_first": True}, "keep_first = True"),
    "a split of what is not quantised": (
        {"q_backward_outputgrad": "fp32", "split_grad_output": {"rank": 4}},
        "split_grad_output splits what is not quantised",
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
def test_fields_that_do_not_fit_are_refused_by_name(changes, message):
    with pytest.raises(UserError) as caught:
        recipe({"base": "nvfp4", **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gradient_that_one_product_quantises_may_be_split():
    block = {"q_backward_outputgrad": "fp32", "q_backward_outputgrad_for_weight": "int8"}
    assert recipe({"base": "nvfp4", **block, "split_grad_output": {"rank": 4}}).split_grad_output.rank == 4


def test_a_recipe_that_quantises_nothing_cannot_split_parameters():
    with pytest.raises(UserError, match="parameter_split needs layers that quantise"):
        recipe({"base": "bf16", "parameter_split": {"rank": 4}})


def test_keys_left_out_of_a_split_come_from_the_base():
    wider = recipe({"base": "metis-seed", "split_grad_output": {"rank": 64}})
    assert wider.split_grad_output.rank == 64
    assert wider.split_grad_output.order == "seed"
    assert wider.split_grad_output.niter == 0
    assert wider.name == "metis-seed with own split_grad_output"
    assert recipe({"base": "metis-seed", "split_grad_output": {"rank": 60}}) == recipe("metis-seed")


def test_a_split_can_be_taken_out_of_a_base():
    assert recipe({"base": "metis-seed", "split_grad_output": None}).split_grad_output is None


@pytest.mark.parametrize("name", ["metis-seed", "metis-nvfp4", "nvidia-nvfp4"])
def test_recipes_with_splits_survive_a_trip_through_json(name):
    import json

    block = json.loads(json.dumps(recipe(name).to_dict()))
    assert recipe(block) == recipe(name)


def test_a_report_names_what_a_split_changes():
    text = str(recipe("metis-seed"))
    assert "split_grad_output (method svd_lowrank, rank 60, niter 0, order seed" in text
