"""Medians and deviations are those of their definitions, and single outliers do not move them."""

import numpy as np
import pytest

from megalowbit.findings.robust import deviation, longest_streak, noise, running_median


def test_deviation_is_that_of_a_normal_distribution_and_outliers_do_not_change_it():
    values = np.random.default_rng(0).normal(3, 0.5, 20_000)
    assert deviation(values) == pytest.approx(0.5, rel=0.03)
    spoiled = values.copy()
    spoiled[:1000] = 1e9
    assert deviation(spoiled) == pytest.approx(0.5, rel=0.12)
    assert deviation(values[:1]) == 0


def test_noise_is_that_of_single_steps_whatever_the_trend():
    draw = np.random.default_rng(1)
    trend = np.linspace(9, 1, 5000)
    assert noise(trend + draw.normal(0, 0.2, 5000)) == pytest.approx(0.2, rel=0.05)
    assert noise(trend[:2]) == 0


@pytest.mark.parametrize("window", [1, 4, 7, 50])
def test_a_running_median_is_that_of_the_values_up_to_each(window):
    values = np.random.default_rng(2).normal(size=40)
    expected = [np.median(values[max(0, place + 1 - window) : place + 1]) for place in range(40)]
    np.testing.assert_allclose(running_median(values, window), expected)


@pytest.mark.parametrize(
    ("flags", "allowed", "expected"),
    [
        ("", 0, (0, 0)),
        ("000", 3, (0, 0)),
        ("0110111", 0, (4, 3)),
        ("0110111", 1, (1, 6)),
        ("1001", 1, (0, 1)),
        ("1001", 2, (0, 4)),
    ],
)
def test_the_longest_streak_begins_and_ends_with_a_true_value(flags, allowed, expected):
    assert longest_streak(np.array([each == "1" for each in flags], dtype=bool), allowed) == expected
