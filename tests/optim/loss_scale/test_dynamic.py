import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.base import GradientStatistics
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler


def run(scaler, steps):
    """Apply a string of steps, `x` overflow and `.` clean."""
    for step in steps:
        scaler.update(step == "x")
    state = scaler.state_dict()
    return state["scale"], state["growth_tracker"], state["hysteresis_tracker"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("", (65536, 0, 2)),
        ("x", (65536, 0, 1)),
        ("xx", (32768, 0, 0)),
        ("x.x", (32768, 0, 0)),
        ("....", (131072, 0, 2)),
        ("x...x....x", (65536, 0, 1)),
    ],
)
def test_scale_growth_and_hysteresis_follow_megatron(steps, expected):
    assert run(DynamicGradScaler(65536, growth_interval=4), steps) == expected


def test_backoff_stops_at_the_minimum():
    scaler = DynamicGradScaler(100, min_scale=7, hysteresis=1)
    scales = []
    for _ in range(5):
        scaler.update(True)
        scales.append(scaler.scale)
    assert scales == [50, 25, 12.5, 7, 7]


def test_after_the_first_backoff_every_overflow_backs_off_at_once():
    scaler = DynamicGradScaler(65536, growth_interval=100)
    assert run(scaler, "xx.....x.....x")[0] == 65536 / 8


def test_growth_stops_at_the_maximum_and_never_reaches_infinity():
    scaler = DynamicGradScaler(2.0**31, growth_interval=1)
    assert run(scaler, "." * 2000)[0] == 2.0**32


@given(
    st.lists(st.booleans(), max_size=200),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([0.5, 0.25]),
)
def test_any_sequence_gives_the_scale_counted_by_hand(overflows, interval, hysteresis, backoff):
    scaler = DynamicGradScaler(2.0**10, 1.0, 2.0, backoff, interval, hysteresis, max_scale=2.0**20)
    exponent, clean, left = 10, 0, hysteresis  # all factors are powers of two: count octaves
    down = int(-math.log2(backoff))
    for found_inf in overflows:
        scaler.update(found_inf)
        if found_inf:
            clean, left = 0, left - 1
            exponent = max(exponent - down, 0) if left <= 0 else exponent
        elif clean + 1 == interval:
            clean, left, exponent = 0, hysteresis, min(exponent + 1, 20)
        else:
            clean += 1
    assert scaler.scale == 2.0**exponent
    assert scaler.inv_scale == 2.0**-exponent


@given(st.lists(st.booleans(), max_size=40), st.lists(st.booleans(), max_size=40))
def test_a_saved_scaler_continues_as_if_not_stopped(before, after):
    whole, first = (DynamicGradScaler(2.0**16, growth_interval=3) for _ in range(2))
    for found_inf in before:
        whole.update(found_inf)
        first.update(found_inf)
    second = DynamicGradScaler(4.0, growth_interval=3)
    second.load_state_dict(first.state_dict())
    for found_inf in after:
        whole.update(found_inf)
        second.update(found_inf)
    assert second.state_dict() == whole.state_dict()


def test_a_tracker_loaded_into_a_shorter_interval_grows_at_the_next_clean_step():
    scaler = DynamicGradScaler(16, growth_interval=4)
    scaler.load_state_dict({"scale": 16.0, "growth_tracker": 8, "hysteresis_tracker": 2})
    assert run(scaler, ".")[0] == 32


def test_a_loaded_scale_below_the_minimum_is_raised_to_it_with_a_warning(caplog):
    scaler = DynamicGradScaler(16, min_scale=4, hysteresis=1)
    scaler.load_state_dict({"scale": 1.0, "growth_tracker": 0, "hysteresis_tracker": 1})
    assert scaler.scale == 4
    assert "outside [4" in caplog.text


@pytest.mark.parametrize("scale", [math.inf, math.nan, 0.0, -2.0])
def test_a_loaded_scale_that_is_no_positive_number_is_refused(scale):
    state = {"scale": scale, "growth_tracker": 0, "hysteresis_tracker": 1}
    with pytest.raises(UserError, match="finite number > 0"):
        DynamicGradScaler().load_state_dict(state)


def test_a_loaded_state_without_keys_is_refused_by_name():
    with pytest.raises(UserError, match="lacks growth_tracker, hysteresis_tracker"):
        DynamicGradScaler().load_state_dict({"scale": 2.0})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"initial_scale": 0}, "initial_scale"),
        ({"initial_scale": math.inf}, "initial_scale"),
        ({"initial_scale": 1, "min_scale": 2}, "initial_scale"),
        ({"initial_scale": 2.0**33}, "initial_scale"),
        ({"min_scale": -1}, "min_scale"),
        ({"max_scale": math.nan}, "max_scale"),
        ({"growth_factor": 1}, "growth_factor"),
        ({"backoff_factor": 1}, "backoff_factor"),
        ({"backoff_factor": 0}, "backoff_factor"),
        ({"growth_interval": 2.5}, "growth_interval"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"hysteresis": True}, "hysteresis"),
        ({"max_scale": 10**400}, "max_scale"),
        ({"consecutive_hysteresis": 1, "mode": "deepspeed"}, "consecutive_hysteresis"),
        ({"consecutive_hysteresis": True}, "consecutive_hysteresis"),
        ({"raise_at_min_scale": True, "mode": "torch"}, "raise_at_min_scale"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments, name):
    with pytest.raises(UserError, match=f"^{name} must be"):
        DynamicGradScaler(**arguments)


def test_a_constant_scale_never_changes_and_ignores_a_dynamic_state():
    scaler = ConstantGradScaler(1024)
    for found_inf in (True, False) * 50:
        scaler.update(found_inf)
    scaler.load_state_dict(DynamicGradScaler().state_dict())
    assert (scaler.scale, scaler.inv_scale, scaler.state_dict()) == (1024, 1 / 1024, {})


@pytest.mark.parametrize("scale", [0, -1, math.inf, math.nan, 10**400, "8", 1e39, 1e-46, 1e-45])
def test_a_constant_scale_must_be_a_positive_number(scale):
    with pytest.raises(UserError, match="scale must be"):
        ConstantGradScaler(scale)


def test_an_unknown_mode_is_refused_with_the_nearest_one():
    with pytest.raises(UserError, match="unknown mode of a grad scaler 'megatorn': did you mean 'megatron'"):
        DynamicGradScaler(mode="megatorn")


def test_update_returns_the_scale_of_the_coming_step():
    scaler = DynamicGradScaler(8.0, growth_interval=2, hysteresis=1)
    assert [scaler.update(found_inf) for found_inf in (False, False, True)] == [8, 16, 8]
    assert ConstantGradScaler(3).update(True) == 3


@pytest.mark.parametrize("mode", ["megatron", "deepspeed", "torch", "clean_step"])
def test_backing_off_for_a_retry_disregards_hysteresis_and_ends_at_the_minimum(mode):
    scaler = DynamicGradScaler(8.0, 2.0, growth_interval=3, hysteresis=3, mode=mode)
    scaler.update(False)
    assert [(scaler.back_off(), scaler.scale) for _ in range(3)] == [(True, 4), (True, 2), (False, 2)]
    assert scaler.state_dict()["growth_tracker"] == 0


@pytest.mark.parametrize("mode", ["megatron", "deepspeed", "clean_step"])
def test_backing_off_for_a_retry_uses_hysteresis_up(mode):
    scaler = DynamicGradScaler(64.0, hysteresis=3, mode=mode)
    scaler.back_off()
    assert scaler.update(True) == 16


def test_a_constant_scale_cannot_back_off():
    scaler = ConstantGradScaler(8)
    assert (scaler.back_off(), scaler.scale) == (False, 8)


def test_plain_scalers_ask_for_no_statistics_and_ignore_them():
    for scaler in (DynamicGradScaler(64.0, growth_interval=9), ConstantGradScaler(64)):
        assert (scaler.needs_amax, scaler.wants_probe, scaler.sample) == (False, False, 1.0)
        assert scaler.update(False, GradientStatistics(loss_scale=64.0, amax=1e9, norm_ratio=9.0)) == 64


@pytest.mark.parametrize("mode", ["megatron", "deepspeed", "torch", "clean_step"])
def test_restarting_growth_resets_the_count_and_keeps_the_scale(mode):
    scaler, other = (DynamicGradScaler(8.0, growth_interval=4, mode=mode) for _ in range(2))
    run(scaler, "...")
    before = scaler.state_dict()
    scaler.restart_growth()
    assert scaler.state_dict() == {**before, "growth_tracker": 0}
    assert [scaler.update(False) for _ in range(9)] == [other.update(False) for _ in range(9)]
    constant = ConstantGradScaler(8)
    constant.restart_growth()
    assert constant.scale == 8


DAMAGED = [None, "3", math.nan, math.inf, -math.inf, 10**400, [1], {}, True, torch.ones(2), torch.ones(2, 1)]


@pytest.mark.parametrize("value", DAMAGED, ids=str)
@pytest.mark.parametrize("key", ["scale", "growth_tracker", "hysteresis_tracker"])
def test_a_damaged_state_is_refused_and_changes_nothing(key, value, caplog):
    scaler = DynamicGradScaler(64.0, min_scale=32.0, growth_interval=9)
    run(scaler, "..")
    before = scaler.state_dict()
    state = {"scale": 2.0, "growth_tracker": 1, "hysteresis_tracker": 1, key: value}
    for load in (scaler.check_state_dict, scaler.load_state_dict):
        with pytest.raises(UserError, match=f"^{key} of the loaded grad scaler state must be"):
            load(state)
        assert scaler.state_dict() == before
    assert caplog.text == ""


@pytest.mark.parametrize("state", [None, 3, "scale", ["scale"], {3: 1.0}])
def test_an_object_that_is_not_a_state_is_rejected(state):
    scaler = DynamicGradScaler(64.0)
    for load in (scaler.check_state_dict, scaler.load_state_dict):
        with pytest.raises(UserError, match="grad scaler state"):
            load(state)
    if not isinstance(state, dict):
        with pytest.raises(UserError, match="must be a mapping"):
            ConstantGradScaler(8).load_state_dict(state)


def test_checking_a_state_changes_and_logs_nothing(caplog):
    scaler = DynamicGradScaler(64.0, min_scale=32.0)
    before = scaler.state_dict()
    scaler.check_state_dict({"scale": 2.0, "growth_tracker": 1, "hysteresis_tracker": 1})
    assert (scaler.state_dict(), caplog.text) == (before, "")
