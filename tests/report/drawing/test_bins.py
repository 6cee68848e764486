"""Down-sampling: every bin keeps its lowest and highest value, means are of all steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.report.drawing.bins import bin_means, extremes, places, running_mean, thinned


@given(st.integers(1, 5000), st.integers(2, 50), st.integers(0, 2**32 - 1))
def test_each_bin_keeps_its_extremes_in_order(count, bins, seed):
    x = np.arange(1.0, count + 1)
    y = np.random.default_rng(seed).normal(size=count)
    kept_x, kept_y = extremes(x, y, bins)
    assert (np.diff(kept_x) > 0).all()
    assert (y[kept_x.astype(int) - 1] == kept_y).all()
    assert len(kept_x) <= 2 * bins + 2
    number = np.minimum(((x - 1) * bins / max(1, count - 1)).astype(int), bins - 1)
    kept = number[kept_x.astype(int) - 1]
    for each in np.unique(number):
        assert kept_y[kept == each].min() == y[number == each].min()
        assert kept_y[kept == each].max() == y[number == each].max()


def test_a_single_spike_in_a_long_run_is_kept_where_it_is():
    y = np.zeros(100_000)
    y[77_776] = 9.0
    kept_x, kept_y = extremes(np.arange(1.0, 100_001), y, 900)
    assert kept_x[kept_y == 9.0].tolist() == [77_777]


def test_a_running_mean_is_that_of_the_values_before():
    y = np.random.default_rng(0).normal(size=50)
    expected = [y[max(0, end - 7) : end].mean() for end in range(1, 51)]
    assert running_mean(y, 7) == pytest.approx(np.array(expected), abs=1e-12)
    assert running_mean(y, 1) is y


def test_marks_of_a_bin_are_one_and_short_series_are_unchanged():
    x = np.arange(1.0, 2001)
    assert len(places(x, 100)) == 100
    assert places(x[:50], 100) is not None
    assert (places(x[:50], 100) == x[:50]).all()
    kept_x, _ = thinned(x, x, 100)
    assert (kept_x[0], kept_x[-1]) == (1, 2000)
    assert len(kept_x) == 101


def test_shares_of_a_bin_still_add_up_to_one():
    first = np.random.default_rng(1).random(5000)
    x, shares = bin_means(np.arange(5000.0), np.stack([first, 1 - first]), 90)
    assert shares.shape == (2, 90)
    assert shares.sum(axis=0) == pytest.approx(np.ones(90))
    assert shares[0].mean() == pytest.approx(first.mean(), abs=0.01)
    assert x[0] == 0
