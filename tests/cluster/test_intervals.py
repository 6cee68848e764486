"""Formulas against what Daly printed, against the model they approximate, and against its limits."""

import math

import pytest

from megalowbit.cluster.intervals import (
    daly_first_order_interval,
    daly_interval,
    expected_seconds,
    young_interval,
)

MINUTE, HOUR = 60.0, 3600.0


def least_expensive(save, mtbf):
    """Where the slope of Daly's model by the interval is zero: 1 − x = e^(−x − save/mtbf), x = τ/mtbf."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - middle > math.exp(-middle - save / mtbf) else (low, middle)
    return low * mtbf


@pytest.mark.parametrize(("mtbf", "printed"), [(24 * HOUR, 117), (6 * HOUR, 57), (0.25 * HOUR, 9.1)])
def test_dalys_formula_gives_the_intervals_of_his_figures_3_to_5(mtbf, printed):
    assert daly_interval(5 * MINUTE, mtbf) / MINUTE == pytest.approx(
        printed, abs=0.5 if printed > 10 else 0.05
    )


@pytest.mark.parametrize("ratio", [1e-4, 1e-3, 1e-2, 0.1, 0.5])
def test_higher_order_is_the_least_expensive_interval(ratio):
    save, mtbf = ratio * HOUR, HOUR
    best = least_expensive(save, mtbf)
    assert daly_interval(save, mtbf) == pytest.approx(best, rel=0.006)
    # and it is one: the model's own neighbours cost more
    cost = [expected_seconds(1, best * factor, save=save, mtbf=mtbf, start=0) for factor in (0.98, 1, 1.02)]
    assert cost[1] < min(cost[0], cost[2])
    assert expected_seconds(1, daly_interval(save, mtbf), save=save, mtbf=mtbf, start=0) < cost[1] * 1.0002


def test_first_orders_agree_where_saves_are_short_and_differ_by_the_restart():
    assert young_interval(1.0, 1e8) == pytest.approx(daly_interval(1.0, 1e8), rel=1e-3)
    assert daly_first_order_interval(60, 2000, 0) == young_interval(60, 2000)
    assert daly_first_order_interval(60, 1500, 500) == young_interval(60, 2000)


def test_dalys_interval_is_at_most_the_mtbf_if_saves_are_slow():
    assert daly_interval(2001.0, 1000.0) == 1000.0
    assert daly_interval(1999.0, 1000.0) == pytest.approx(1000.0, rel=0.15)


def test_expected_time_without_failures_is_training_and_saves():
    seconds = expected_seconds(1000, 100, save=7, mtbf=1e12, start=50, pause=60)
    assert seconds == pytest.approx(1000 + 10 * 7, rel=1e-6)


def test_a_hopeless_interval_is_expensive_but_does_not_overflow():
    assert expected_seconds(1.0, 1e9, save=1, mtbf=1.0, start=1e9) > 1e300
