import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.config.batch_size import fill_batch_sizes
from megalowbit.errors import UserError

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
small = st.integers(1, 12)


@given(small, small, small, st.sets(st.sampled_from(KEYS), min_size=1), st.booleans())
def test_any_determining_subset_gives_back_all_three(micro, steps, world, given_keys, is_auto):
    values = dict(zip(KEYS, (micro * steps * world, micro, steps), strict=True))
    is_determined = len(given_keys) >= 2
    config = {key: value for key, value in values.items() if key in given_keys}
    if is_auto:
        config = {key: config.get(key, "auto") for key in KEYS}
    elif given_keys == {"gradient_accumulation_steps"}:
        return  # refused, see below
    fill_batch_sizes(config, world)
    assert config[KEYS[0]] == config[KEYS[1]] * config[KEYS[2]] * world
    assert all(config[key] == values[key] for key in given_keys)
    if is_determined:
        assert config == values


def test_undetermined_values_are_one():
    config = dict.fromkeys(KEYS, "auto")
    fill_batch_sizes(config, 4)
    assert config == dict(zip(KEYS, (4, 1, 1), strict=True))


def test_a_product_that_does_not_come_out_is_named():
    with pytest.raises(UserError, match=r"train_batch_size 10 is not .*4 × .*2 × 2 processes = 16"):
        fill_batch_sizes(dict(zip(KEYS, (10, 4, 2), strict=True)), 2)


def test_a_division_that_does_not_come_out_names_the_next_batch_size_that_does():
    with pytest.raises(UserError, match=r"10 is not a multiple of 2 processes × .* 4 = 8: use 16"):
        fill_batch_sizes({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, 2)


@pytest.mark.parametrize("config", [{}, {"gradient_accumulation_steps": 2}])
def test_no_batch_size_at_all_is_refused(config):
    with pytest.raises(UserError, match="train_micro_batch_size_per_gpu is missing"):
        fill_batch_sizes(config, 1)


@pytest.mark.parametrize("value", [0, -1, 2.0, "4", True])
def test_a_value_that_is_no_count_is_refused(value):
    with pytest.raises(UserError, match="must be a whole number ≥ 1"):
        fill_batch_sizes({"train_micro_batch_size_per_gpu": value}, 1)
