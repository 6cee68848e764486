import itertools
import math
import random
import statistics

import pytest

from megalowbit.pretrain.sweep.study.report.statistics import (
    Estimate,
    compare_all,
    delay,
    holm,
    probability_within,
    t_quantile,
)

# two-sided quantiles of printed tables: degrees of freedom, 90 %, 95 %, 99 %
TABLE = [
    (1, 6.314, 12.706, 63.657),
    (2, 2.920, 4.303, 9.925),
    (3, 2.353, 3.182, 5.841),
    (4, 2.132, 2.776, 4.604),
    (5, 2.015, 2.571, 4.032),
    (9, 1.833, 2.262, 3.250),
    (20, 1.725, 2.086, 2.845),
    (30, 1.697, 2.042, 2.750),
    (120, 1.658, 1.980, 2.617),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"dof {row[0]}")
def test_quantiles_are_those_of_tables(row):
    for confidence, expected in zip((0.90, 0.95, 0.99), row[1:], strict=True):
        assert t_quantile(confidence, row[0]) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 7, 12, 31])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 8.0])
def test_probabilities_are_integrals_of_the_density(dof, t):
    constant = math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(dof * math.pi)

    def density(x):
        return constant * (1 + x * x / dof) ** (-(dof + 1) / 2)

    count = 2000  # Simpson's rule
    width = t / count
    weights = [1, *[4, 2] * (count // 2 - 1), 4, 1]
    integral = width / 3 * sum(w * density(n * width) for n, w in enumerate(weights))
    assert probability_within(t, dof) == pytest.approx(2 * integral, abs=1e-9)


def test_a_quantile_inverts_the_probability():
    for dof, confidence in itertools.product((1, 4, 25), (0.001, 0.5, 0.999999)):
        assert probability_within(t_quantile(confidence, dof), dof) == pytest.approx(confidence, abs=1e-12)
    with pytest.raises(ValueError, match="confidence"):
        t_quantile(1.0, 3)
    with pytest.raises(ValueError, match="dof"):
        probability_within(1.0, 0)


def test_an_interval_is_mean_and_t_times_standard_error():
    found = Estimate.of([0.3, 0.1, 0.2, 0.4, 0.5])
    error = statistics.stdev([1, 2, 3, 4, 5]) / 10 / math.sqrt(5)
    assert found.mean == pytest.approx(0.3)
    assert found.low == pytest.approx(0.3 - 2.7764451 * error)
    assert found.high == pytest.approx(0.3 + 2.7764451 * error)
    assert found.p == pytest.approx(0.0132, abs=1e-4)  # t = 4.2426, 4 degrees of freedom
    assert found.excludes_zero
    assert not Estimate.of([0.3, -0.2, 0.1]).excludes_zero
    single = Estimate.of([0.3])
    assert (single.mean, single.low, single.high, single.excludes_zero) == (0.3, None, None, False)
    assert Estimate.of([0.5, 0.5]).p == 0.0
    assert Estimate.of([0.0, 0.0]).p == 1.0
    assert found.scaled(10).high == pytest.approx(10 * found.high)


def test_an_interval_covers_the_true_mean_as_often_as_it_says():
    draw = random.Random(1)
    found = [Estimate.of([draw.gauss(1.0, 2.0) for _ in range(5)]) for _ in range(2000)]
    assert sum(each.low <= 1.0 <= each.high for each in found) / 2000 == pytest.approx(0.95, abs=0.015)


def test_holm_equals_the_closed_test_of_bonferroni():
    """By brute force: the p of a hypothesis is the largest over all sets that contain it."""
    draw = random.Random(2)
    for _ in range(50):
        values = [draw.choice([0.001, 0.01, 0.02, 0.04, 0.3, 0.9]) for _ in range(5)]
        subsets = [s for size in range(1, 6) for s in itertools.combinations(range(5), size)]
        expected = [
            max(min(1.0, len(s) * min(values[i] for i in s)) for s in subsets if index in s)
            for index in range(5)
        ]
        assert holm(values) == pytest.approx(expected)
    assert holm([]) == []


def test_only_recipes_that_differ_within_pairs_are_separated():
    noise = {1: 0.5, 2: -0.4, 3: 0.1, 4: 0.2, 5: -0.3}  # of the seeds; larger than what is compared
    losses = {
        "a": {seed: 2 + shift for seed, shift in noise.items()},
        "b": {seed: 2.03 + shift + 0.001 * seed for seed, shift in noise.items()},
        "c": {seed: 2 + shift + 0.02 * (-1) ** seed for seed, shift in noise.items()},
        "d": {1: 2.0},
    }
    found = {(each.first, each.second): each for each in compare_all(losses)}
    assert set(found) == {("a", "b"), ("a", "c"), ("b", "c")}
    assert found["a", "b"].is_separated
    assert found["a", "b"].difference.mean == pytest.approx(-0.033)
    assert not found["a", "c"].is_separated
    assert found["a", "b"].adjusted_p == pytest.approx(3 * found["a", "b"].difference.p)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(1.0, 0), (1.5, 5), (2.0, 10), (2.25, 12.5), (3.0, 20), (3.1, None), (0.9, 0), (math.nan, None)],
)
def test_a_delay_is_interpolated_between_points(loss, expected):
    assert delay(loss, {30: 1.0, 10: 3.0, 20: 2.0}) == expected
    assert delay(loss, {30: 1.0, 10: 3.0, 15: math.nan, 20: 2.0}) == expected


def test_a_delay_counts_from_the_first_time_of_both_losses():
    curve = {10: 3.0, 20: 1.5, 30: 2.0, 40: 1.0, 50: 0.9, 60: 1.2}  # down to 1.2 at 38
    assert delay(1.8, curve) == pytest.approx(38 - 18)
    assert delay(1.2, curve) == 0  # an equal recipe is not late, although the baseline had this loss before
    assert delay(2.0, {10: 3.0, 20: 2.0, 30: 2.0}) == 0


def test_a_delay_is_unknown_without_a_curve_and_where_one_point_says_nothing():
    assert delay(2.0, {}) is None
    assert delay(2.0, {10: math.nan}) is None
    assert delay(2.0, {10: 1.9}) is None
    assert delay(1.8, {10: 1.9}) == 0
