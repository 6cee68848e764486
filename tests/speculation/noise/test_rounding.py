import math

import numpy as np
import pytest
from quick_cases import every_value

from megalowbit.quantize.names import quantizer
from megalowbit.speculation.noise.rounding import rounding_error, zero_probability

GRIDS = {"int8": 500.0, "int4": 8.0, "fp8e4m3": 9.0, "fp8e5m2": 300.0, "fp4e2m1": 3.0}  # M of each
EVERYTHING = (-math.inf, math.inf)


def grid_of(name, absmax):
    numbers = np.array(quantizer(name).encoding.format.element.grid)
    numbers = numbers / numbers[-1] * absmax
    return np.unique(np.concatenate([-numbers, numbers]))


def integrated(levels, sigma, center, is_stochastic, bounds=EVERYTHING):
    """The mean squared error by the trapezium rule, element by element as the definition has it."""
    low, high = max(center - 10 * sigma, bounds[0]), min(center + 10 * sigma, bounds[1])
    x = np.linspace(low, high, 1_000_001)
    above = np.clip(np.searchsorted(levels, x), 1, len(levels) - 1)
    down, up = x - levels[above - 1], levels[above] - x
    error = np.minimum(down**2, up**2)
    if is_stochastic:
        beyond = np.maximum(levels[0] - x, x - levels[-1])
        error = np.where(beyond > 0, beyond**2, up * down)
    weight = np.exp(-0.5 * ((x - center) / sigma) ** 2)
    return np.trapezoid(error * weight, x) / np.trapezoid(weight, x)


@every_value(name=GRIDS, is_stochastic=[False, True], center=[0.0, 0.3, -1.7])
def test_it_is_the_integral_of_the_squared_error(name, is_stochastic, center):
    levels = grid_of(name, GRIDS[name])
    for bounds in (EVERYTHING, (-GRIDS[name], GRIDS[name]), (-0.8, 2.0)):
        found = rounding_error(levels, 1.0, center, is_stochastic=is_stochastic, bounds=bounds)
        assert found == pytest.approx(integrated(levels, 1.0, center, is_stochastic, bounds), rel=1e-5)


def test_a_fine_even_grid_errs_by_a_twelfth_of_its_squared_step():
    levels = np.arange(-127, 128) / 127 * 32
    step = 32 / 127
    nearest = rounding_error(levels, 1.0, 0.2, is_stochastic=False)
    stochastic = rounding_error(levels, 1.0, 0.2, is_stochastic=True)
    assert nearest == pytest.approx(step**2 / 12, rel=1e-9)
    assert stochastic == pytest.approx(step**2 / 6, rel=1e-9)


def test_a_coarse_grid_loses_everything():
    assert rounding_error([-100.0, 0.0, 100.0], 1.0, 0.0, is_stochastic=False) == pytest.approx(1.0)


@pytest.mark.parametrize("is_stochastic", [False, True])
def test_it_scales_with_the_square_and_not_with_the_sign(is_stochastic):
    levels = grid_of("fp4e2m1", 3.0)
    one = rounding_error(levels, 0.7, 0.4, is_stochastic=is_stochastic)
    assert rounding_error(levels * 5, 3.5, 2.0, is_stochastic=is_stochastic) == pytest.approx(25 * one)
    assert rounding_error(levels, 0.7, -0.4, is_stochastic=is_stochastic) == pytest.approx(one)


def test_a_point_errs_by_its_distance():
    levels = [-1.0, 0.0, 1.0]
    for center, nearest, stochastic in (
        (0.3, 0.09, 0.21),
        (0.5, 0.25, 0.25),
        (1.0, 0, 0),
        (-1.5, 0.25, 0.25),
    ):
        assert rounding_error(levels, 0.0, center, is_stochastic=False) == pytest.approx(nearest)
        assert rounding_error(levels, 0.0, center, is_stochastic=True) == pytest.approx(stochastic)
        narrow = rounding_error(levels, 1e-6, center, is_stochastic=True)
        assert narrow == pytest.approx(stochastic, abs=1e-5)


def test_a_grid_of_one_number():
    for is_stochastic in (False, True):
        assert rounding_error([0.0], 2.0, 1.0, is_stochastic=is_stochastic) == pytest.approx(5.0)


def test_bounds_without_probability_leave_no_mean():
    assert math.isnan(rounding_error([0.0, 1.0], 1.0, 0.0, is_stochastic=False, bounds=(20.0, 30.0)))


# Zeros


@every_value(center=[0.0, 0.4, -2.0], ratio=[8, 32, 128])
def test_zero_probability_is_the_share_of_zeros(center, ratio):
    step = ratio / 127
    x = np.random.default_rng(3).normal(center, 1.0, 4_000_000)
    share = np.mean(np.rint(x / step) == 0)
    error = math.sqrt(share / len(x))
    assert zero_probability(step, 1.0, center) == pytest.approx(share, abs=4 * error)


def test_zero_probability_without_a_center_is_an_error_function():
    assert zero_probability(0.5, 2.0) == math.erf(0.5 / (2 * math.sqrt(2) * 2.0))
    assert zero_probability(0.5, 2.0, 1e-9) == pytest.approx(zero_probability(0.5, 2.0), rel=1e-9)


def test_zero_probability_keeps_its_digits_far_from_zero():
    x = np.linspace(-0.05, 0.05, 10_001)
    density = np.exp(-0.5 * (x - 12.0) ** 2) / math.sqrt(2 * math.pi)
    assert zero_probability(0.1, 1.0, 12.0) == pytest.approx(np.trapezoid(density, x), rel=1e-6)
    assert zero_probability(0.1, 1.0, -12.0) == zero_probability(0.1, 1.0, 12.0)


def test_zero_probability_of_a_point():
    assert zero_probability(1.0, 0.0, 0.4) == 1.0
    assert zero_probability(1.0, 0.0, 0.6) == 0.0
    assert zero_probability(0.0, 1.0) == 0.0
