import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.telemetry.moving_rate import MovingRate


class Clock:
    """Time as the test sets it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_first_step_is_left_out_however_slow():
    clock = Clock()
    rate = MovingRate(clock=clock)
    clock.now += 60
    assert rate.add(1000) is None
    clock.now += 2
    assert rate.add(1000) == 500
    assert rate.average == 500
    assert rate.steps == 1


def test_the_moving_figure_forgets_and_the_average_does_not():
    clock = Clock()
    rate = MovingRate(window=2, clock=clock)
    rate.add(10)
    for seconds in (10, 1, 1):
        clock.now += seconds
        rate.add(10)
    assert rate.now == 10
    assert rate.average == 30 / 12


def test_no_time_gives_no_rate():
    rate = MovingRate(clock=Clock())
    assert rate.now is None
    assert rate.average is None
    rate.add(1)
    assert rate.add(1) is None


@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 10**9)), min_size=2, max_size=60))
def test_rates_equal_amounts_over_times(steps):
    clock = Clock()
    rate = MovingRate(window=5, clock=clock)
    for seconds, amount in steps:
        clock.now += seconds
        rate.add(amount)
    last = steps[1:][-5:]
    assert rate.now == pytest.approx(sum(a for _, a in last) / sum(s for s, _ in last), rel=1e-6)
    rest = steps[1:]
    assert rate.average == pytest.approx(sum(a for _, a in rest) / sum(s for s, _ in rest), rel=1e-6)


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match="window must be at least 1 step, not 0"):
        MovingRate(window=0)
