import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.base import GradientStatistics
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.gradient_based import StrategyGradScaler, octaves_below

steady = settings(deadline=None, derandomize=True)


class ScriptedScaler(StrategyGradScaler):
    """Wants exactly the octave passed as `amax`, to test the rules of the base class alone."""

    NAME = "scripted"
    STATE = {"scripted": None}  # noqa: RUF012

    def _gather(self, statistics):
        self._octave = statistics.amax

    def _wanted(self):
        return self._octave


class ScalerWithLevel(ScriptedScaler):
    def _level(self):
        return self._octave


def step(scaler, octave=None, found_inf=False):
    return math.log2(scaler.update(found_inf, GradientStatistics(loss_scale=scaler.scale, amax=octave)))


@steady
@given(st.lists(st.tuples(st.booleans(), st.floats(-200, 200)), max_size=60), st.floats(0.01, 4.0))
def test_any_wanted_scale_gives_a_power_of_two_within_bounds_and_at_most_an_octave_up(wishes, low):
    scaler = ScriptedScaler(16.0, low, max_scale=5000.0, growth_interval=3)
    for found_inf, octave in wishes:
        before = scaler.scale
        after = 2.0 ** step(scaler, octave, found_inf)
        assert math.frexp(after)[0] == 0.5
        assert low <= after <= 4096.0
        assert after <= 2 * before
        if found_inf:
            assert after == before / 2 or (after == before and before / 2 < low)


def test_a_wanted_scale_is_rounded_down_and_falls_are_not_limited():
    scaler = ScriptedScaler(2.0**15)
    assert step(scaler, 15.9) == 15
    assert step(scaler, 3.9) == 3
    assert step(scaler, 20.0) == 4
    assert step(scaler, math.nan) == 4
    assert step(scaler, None) == 4
    assert step(scaler, 5.0 - 1e-9) == 5  # noise of the last bits


def test_the_first_scale_is_rounded_down_to_a_power_of_two():
    assert ScriptedScaler(1000.0).scale == 512.0
    assert ScriptedScaler(3.0, 3.0, max_scale=20.0).scale == 4.0  # 2 is below the minimum


def test_the_scale_rises_only_every_n_clean_steps_but_falls_at_once():
    scaler = ScriptedScaler(2.0**10, update_every=3)
    assert [step(scaler, 20.0) for _ in range(7)] == [10, 10, 11, 11, 11, 12, 12]
    assert step(scaler, found_inf=True) == 11
    assert [step(scaler, 5.0) for _ in range(3)] == [11, 11, 5]


def test_after_an_overflow_the_scale_waits_and_returns_by_an_octave_for_each_interval():
    scaler = ScriptedScaler(2.0**10, growth_interval=4)
    step(scaler, found_inf=True)
    step(scaler, found_inf=True)
    assert [step(scaler, 20.0) for _ in range(12)] == [8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 11]


def test_each_overflow_restarts_the_wait():
    scaler = ScriptedScaler(2.0**10, growth_interval=4)
    step(scaler, found_inf=True)
    for _ in range(3):
        step(scaler, 20.0)
    assert step(scaler, found_inf=True) == 8
    assert [step(scaler, 20.0) for _ in range(4)] == [8, 8, 8, 9]


def test_shrinking_gradients_raise_the_limit_of_the_wait_by_the_same_factor():
    scaler = ScalerWithLevel(2.0**10, growth_interval=1000)
    step(scaler, 10.0)
    step(scaler, found_inf=True)
    assert step(scaler, 10.5) == 9  # half an octave more fits than at the overflow
    assert [step(scaler, 13.0) for _ in range(5)] == [10, 11, 12, 12, 12]


def test_backing_off_for_a_retry_is_an_overflow_and_ends_at_the_minimum():
    scaler = ScriptedScaler(8.0, 2.0)
    assert [(scaler.back_off(), scaler.scale) for _ in range(3)] == [(True, 4), (True, 2), (False, 2)]
    assert step(scaler, 20.0) == 1  # it waits as after an overflow


@pytest.mark.parametrize("amax", [None, 0.0, math.inf, math.nan])
def test_an_amax_of_zero_or_non_finite_gives_no_octave(amax):
    assert octaves_below(2.0**15, amax) is None


def test_octaves_below_are_exact_for_powers_of_two_and_do_not_overflow():
    assert octaves_below(2.0**15, 2.0**-20) == 35.0
    assert octaves_below(2.0**15, 5e-324) == 1089.0


@steady
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 40)), max_size=30), st.integers(1, 3))
def test_a_state_through_json_continues_as_if_not_stopped(wishes, update_every):
    whole, later = (ScriptedScaler(update_every=update_every, growth_interval=2) for _ in range(2))
    for found_inf, octave in wishes:
        step(whole, octave, found_inf)
    later.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert later.state_dict() == whole.state_dict()
    for found_inf, octave in wishes:
        assert step(later, octave, found_inf) == step(whole, octave, found_inf)
    assert later.state_dict() == whole.state_dict()


def test_only_the_scale_of_a_foreign_state_is_loaded():
    scaler = ScriptedScaler(growth_interval=2)
    step(scaler, 12.0)
    step(scaler, found_inf=True)
    scaler.load_state_dict(DynamicGradScaler(100.0).state_dict())
    assert scaler.state_dict() == {**ScriptedScaler(64.0).state_dict(), "scale": 64.0}


def test_a_loaded_scale_outside_the_bounds_is_clamped_with_a_warning(caplog):
    scaler = ScriptedScaler(8.0, 4.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
    assert scaler.scale == 4.0
    assert "outside [4" in caplog.text


def test_a_state_that_lacks_something_is_refused_by_name():
    state = ScriptedScaler().state_dict()
    del state["ceiling"]
    with pytest.raises(UserError, match="scripted grad scaler state lacks ceiling"):
        ScriptedScaler().load_state_dict(state)
    with pytest.raises(UserError, match=r"steps of the loaded .* must be a whole number"):
        ScriptedScaler().load_state_dict({**ScriptedScaler().state_dict(), "steps": "3"})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"initial_scale": 0}, "initial_scale"),
        ({"initial_scale": 2.0**33}, "initial_scale"),
        ({"min_scale": math.nan}, "min_scale"),
        ({"initial_scale": 5.0, "min_scale": 5.0, "max_scale": 7.0}, "max_scale"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"update_every": 1.5}, "update_every"),
        ({"sample": 0.0}, "sample"),
        ({"sample": 1.01}, "sample"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments, name):
    with pytest.raises(UserError, match=f"^{name} must be"):
        ScriptedScaler(**arguments)


def test_restarting_growth_resets_the_wait_and_keeps_the_scale():
    scaler = ScriptedScaler(2.0**10, growth_interval=4, update_every=2)
    step(scaler, found_inf=True)
    for _ in range(3):
        step(scaler, 20.0)
    before = scaler.state_dict()
    scaler.restart_growth()
    assert scaler.state_dict() == {**before, "since_move": 0, "since_overflow": 0}
    assert [step(scaler, 20.0) for _ in range(4)] == [9, 9, 9, 10]
