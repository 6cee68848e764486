import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.config.values import (
    BOOLEAN_KEYS,
    OBJECT_KEYS,
    check_parameter_split,
    check_values,
    is_count,
    is_finite_number,
)
from megalowbit.errors import UserError, shown


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"steps_per_print": 10, "vocabulary_size": 50304, "dataloader_drop_last": True},
        {"steps_per_print": None, "log_level": None, "communication_data_type": None},
        {"log_level": "WARNING", "communication_data_type": "fp32", "gradient_allreduce_op": "sum"},
        {"prescale_gradients": True, "gradient_predivide_factor": 8},
        {"zero_optimization": False, "checkpoint": {}, "csv_monitor": {"enabled": True}},
        {"comet": {"enabled": False}, "wandb": {}},
    ],
)
def test_what_deepspeed_can_use_passes(config):
    check_values(config)


@pytest.mark.parametrize("key", sorted(OBJECT_KEYS))
@pytest.mark.parametrize("value", [[], 3, "on", None])
def test_a_block_that_is_no_object_is_refused(key, value):
    with pytest.raises(UserError, match=f"^{key} = .* must be an object {{…}}"):
        check_values({key: value})


@pytest.mark.parametrize("key", sorted(BOOLEAN_KEYS))
@pytest.mark.parametrize("value", [0, 1, "true", [], None])
def test_a_switch_that_is_no_boolean_is_refused(key, value):
    with pytest.raises(UserError, match=f"^{key} = .* must be true or false"):
        check_values({key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps_per_print", 0),
        ("steps_per_print", "a"),
        ("steps_per_print", 2.5),
        ("steps_per_print", True),
        ("gradient_predivide_factor", 0),
        ("gradient_predivide_factor", -2.0),
        ("gradient_predivide_factor", 1e-300),
        ("gradient_predivide_factor", 10**400),
        ("gradient_predivide_factor", float("nan")),
        ("gradient_predivide_factor", True),
        ("gradient_predivide_factor", None),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_one_line_with_key_and_value(key, value):
    with pytest.raises(UserError) as caught:
        check_values({key: value})
    assert str(caught.value).startswith(f"{key} = {shown(value)} must be")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log_level", "bogus"),
        ("log_level", 10),
        ("gradient_allreduce_op", "max"),
        ("gradient_allreduce_op", None),
        ("communication_data_type", "fp99"),
        ("communication_data_type", 16),
        ("seq_parallel_communication_data_type", True),
    ],
)
def test_a_name_deepspeed_does_not_know_is_refused_with_those_it_knows(key, value):
    with pytest.raises(UserError, match=f"^unknown {key} {value!r}: .*known: "):
        check_values({key: value})


@pytest.mark.parametrize(
    ("key", "package"), [("comet", "comet_ml"), ("wandb", "wandb"), ("tensorboard", "tensorboard")]
)
def test_a_monitor_needs_its_package(key, package, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match=f"^{key}.enabled = True .* pip install {package}"):
        check_values({key: {"enabled": True}})
    # what an earlier run leaves in the working directory is no package
    (tmp_path / package).mkdir()
    with pytest.raises(UserError, match=f"pip install {package}"):
        check_values({key: {"enabled": True}})
    (tmp_path / package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), "elsewhere"])
    sys.path_importer_cache.pop(str(tmp_path), None)
    check_values({key: {"enabled": True}})


@given(st.integers() | st.floats() | st.integers(min_value=10**308, max_value=10**310))
def test_a_number_is_finite_if_it_converts_to_a_finite_float(value):
    try:
        expected = abs(float(value)) < float("inf")
    except OverflowError:
        expected = False
    assert is_finite_number(value) is expected


def test_a_count_is_a_positive_whole_number_of_64_bits():
    assert [value for value in (1, 2**63 - 1) if not is_count(value)] == []
    assert [value for value in (0, -1, 2**63, 1.0, True, "1", None) if is_count(value)] == []


SPLIT = {"base": "nvfp4", "parameter_split": {"rank": 8}}


@pytest.mark.parametrize("zero", [True, {"stage": 1}, {"stage": 2}, {"stage": 3, "offload_param": None}])
@pytest.mark.parametrize("recipe", [SPLIT, {"base": SPLIT, "keep_last": 1}])
def test_splitting_parameters_under_zero_is_refused_with_the_way_out(zero, recipe):
    with pytest.raises(UserError, match=r"set zero_optimization.stage 0; from stage 1 on use split_weight"):
        check_parameter_split({"zero_optimization": zero}, recipe)


@pytest.mark.parametrize("zero", [None, False, {}, {"stage": 0}])
def test_without_sharding_parameters_may_be_split(zero):
    check_parameter_split({"zero_optimization": zero}, SPLIT)
    check_parameter_split({}, SPLIT)


@pytest.mark.parametrize(
    "recipe",
    [None, "nvfp4", {"base": "nvfp4", "split_weight": {"rank": 8}}, {"base": SPLIT, "parameter_split": None}],
)
def test_zero_is_no_obstacle_to_other_recipes(recipe):
    check_parameter_split({"zero_optimization": {"stage": 2}}, recipe)
