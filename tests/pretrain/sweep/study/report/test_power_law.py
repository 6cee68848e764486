"""Power laws fitted to synthetic gaps whose exponent is known."""

import math
import random
import statistics

import pytest
from quick_cases import slow_except

from megalowbit.pretrain.sweep.study.report.power_law import fit
from megalowbit.pretrain.sweep.study.report.statistics import f_exceeds, probability_within, t_quantile

SIZES = (840_000, 1_900_000, 7_500_000)


def drawn(draw, exponent, *, noise, gap=0.02, seeds=5, sizes=SIZES):
    """Gaps with normal noise, of one deviation or one for each size, around gap · (N / 2M)^exponent."""
    noises = noise if isinstance(noise, tuple) else (noise,) * len(sizes)
    return {
        n: [gap * (n / 2e6) ** exponent + draw.gauss(0, each) for _ in range(seeds)]
        for n, each in zip(sizes, noises, strict=True)
    }


@pytest.mark.parametrize("exponent", [-1.3, -0.4, 0.0, 0.7])
def test_an_exact_law_is_found(exponent):
    found = fit({n: [each] for n, (each,) in drawn(random.Random(0), exponent, noise=0.0, seeds=1).items()})
    assert found.exponent == pytest.approx(exponent, abs=1e-6)
    assert found.at(2e6) == pytest.approx(0.02, rel=1e-6)
    assert found.size == pytest.approx(math.prod(SIZES) ** (1 / 3))
    assert (found.low, found.high, found.p_of_fit) == (None, None, None)
    assert found.conclusion == "uncertainty unknown: it needs several seeds"


RISING = (0.007, 0.012, 0.024)  # as the gaps of nvfp4 scatter at the sizes of docs/experiments/loss.md
CASES = [(-0.5, 0.002), (-0.2, 0.004), (0.5, 0.003), (0.0, RISING), (-0.5, RISING), (0.0, RISING[::-1])]


@pytest.mark.parametrize(("exponent", "noise"), slow_except([(0.0, RISING)], CASES))
def test_the_interval_contains_the_exponent_as_often_as_it_says(exponent, noise):
    draw, count = random.Random(1), 200 if (exponent, noise) == (0.0, RISING) else 500
    found = [fit(drawn(draw, exponent, noise=noise, gap=0.03)) for _ in range(count)]
    covered = sum(
        (each.low is None or each.low <= exponent) and (each.high is None or exponent <= each.high)
        for each in found
    )
    assert covered / count == pytest.approx(0.95, abs=0.03)
    assert sum(each.p_of_fit < 0.05 for each in found) / count == pytest.approx(0.05, abs=0.03)


def test_least_squares_agree_with_brute_force():
    values = drawn(random.Random(3), -0.6, noise=0.003)
    found = fit(values)

    def squares(scale, exponent):
        return sum((y - scale * (n / found.size) ** exponent) ** 2 for n in values for y in values[n])

    scales = [found.gap * (0.98 + 0.0004 * number) for number in range(101)]
    exponents = [found.exponent - 0.02 + 0.0004 * number for number in range(101)]
    best = min(((a, b) for a in scales for b in exponents), key=lambda pair: squares(*pair))
    assert best == pytest.approx((found.gap, found.exponent), abs=5e-4)


def test_the_ends_of_the_interval_are_where_welchs_t_of_the_slope_is_that_of_the_table():
    """The derivative of the least squares by the exponent, taken numerically, as a contrast of the means."""
    values = drawn(random.Random(3), -0.6, noise=(0.001, 0.003, 0.004))
    found = fit(values)

    def least(means, exponent):
        shape = {n: (n / found.size) ** exponent for n in values}
        scale = sum(means[n] * shape[n] for n in values) / sum(x**2 for x in shape.values())
        return scale, 5 * sum((means[n] - scale * shape[n]) ** 2 for n in values)

    def contrast(means, exponent):
        slope = (least(means, exponent + 1e-5)[1] - least(means, exponent - 1e-5)[1]) / 2e-5
        return slope / least(means, exponent)[0]

    means = {n: statistics.fmean(each) for n, each in values.items()}
    for end in (found.low, found.high):
        value, parts = contrast(means, end), []
        for n in values:
            moved = {**means, n: means[n] + 1e-3}
            weight = (contrast(moved, end) - value) / 1e-3
            parts.append(weight**2 * statistics.variance(values[n]) / 5)
        dof = sum(parts) ** 2 / sum(each**2 / 4 for each in parts)
        t = abs(value) / math.sqrt(sum(parts))
        assert t_quantile(0.95, math.ceil(dof)) < t < t_quantile(0.95, math.floor(dof))
    assert found.low < found.exponent < found.high


def test_one_seed_at_a_size_leaves_the_uncertainty_unknown():
    values = drawn(random.Random(3), -0.6, noise=0.001)
    found = fit({**values, SIZES[2]: values[SIZES[2]][:1]})
    assert found.exponent == pytest.approx(-0.6, abs=0.2)
    assert (found.low, found.high, found.p_of_fit) == (None, None, None)
    assert found.conclusion == "uncertainty unknown: it needs several seeds"


def test_it_says_what_the_data_do_not_support():
    draw = random.Random(4)
    assert fit(drawn(draw, -0.8, noise=0.001)).conclusion == "falls with size"
    assert fit(drawn(draw, 0.8, noise=0.001)).conclusion == "grows with size"
    assert fit(drawn(draw, 0.0, noise=0.003)).conclusion.startswith("no trend is shown")
    vague = fit({n: [-0.03, 0.02, 0.07] for n in SIZES})
    assert (vague.low, vague.high) == (None, None)
    assert vague.conclusion == "these data do not determine the exponent"
    assert fit(drawn(draw, 0.0, noise=0.001, gap=-0.02)).exponent is None
    gaps = zip(SIZES, (1, 3, 1), strict=True)
    bent = {n: [gap + draw.gauss(0, 0.0005) for _ in range(5)] for n, gap in gaps}
    assert fit(bent).conclusion.startswith("no power law fits these sizes (p = ")
    with pytest.raises(ValueError, match="3 sizes with values"):
        fit({1: [0.1], 2: [0.1]})


def test_the_f_distribution_is_that_of_tables_and_of_t_squared():
    for dof, noise, value in ((1, 12, 4.747), (2, 12, 3.885), (3, 20, 3.098), (5, 10, 3.326), (4, 4, 6.388)):
        assert f_exceeds(value, dof, noise) == pytest.approx(0.05, abs=1e-4)
    for noise in (1, 2, 7, 30):
        for t in (0.1, 1.0, 2.5, 20.0):
            assert f_exceeds(t * t, 1, noise) == pytest.approx(1 - probability_within(t, noise), abs=1e-9)
    assert f_exceeds(0.0, 2, 5) == 1.0
