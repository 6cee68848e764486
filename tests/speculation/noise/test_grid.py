import math

import numpy as np
import pytest
import torch

from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey
from megalowbit.speculation.noise.grid import (
    Grid,
    even_error,
    exact_error,
    gaussian_error,
    levels,
    magnitudes,
)

NAMES = {  # quantizers with one scale, by the format of their elements
    "e2m1": "fp4e2m1",
    "e3m2": "fp6e3m2",
    "e4m3": "fp8e4m3",
    "e5m2": "fp8e5m2",
    "int8": "int8",
    "int4": "int4",
}
GRIDS = [Grid(element, is_stochastic) for element in NAMES for is_stochastic in (False, True)]


def measured(x, grid):
    """Mean squared error of the quantizer itself."""
    name = NAMES[grid.element] + (":sr" if grid.is_stochastic else "")
    x = torch.as_tensor(x, dtype=torch.float32)
    return (quantizer(name)(x, random_key=RandomKey(11)).double() - x.double()).square().mean().item()


@pytest.mark.parametrize("element", NAMES)
def test_levels_are_those_of_the_quantizer(element):
    numbers = quantizer(NAMES[element]).encoding.format.element.grid
    assert magnitudes(element).tolist() == [number / numbers[-1] for number in numbers]
    assert np.array_equal(levels(element), -levels(element)[::-1])
    assert len(levels(element)) == 2 * len(numbers) - 1


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("center", [0.0, 0.8, 3.1])
def test_a_bulk_errs_as_the_quantizer_does(grid, center):
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(1)) * 0.3 + center * 0.3
    x[0] = 0.3 * 20
    assert gaussian_error(grid, 6.0, 0.3, center * 0.3) == pytest.approx(measured(x, grid), rel=0.03)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_tables_agree_with_the_closed_form(grid):
    random = np.random.default_rng(2)
    for _ in range(60):
        ratio, center = 2 ** random.uniform(2, 11), random.uniform(-3.9, 3.9)
        exact = exact_error(grid, ratio, 1.0, center)
        # centers stand half a sigma apart, which coarse rounding notices
        assert gaussian_error(grid, ratio, 1.0, center) == pytest.approx(exact, rel=0.08)
        assert gaussian_error(grid, ratio, 1.0, 0.0) == pytest.approx(
            exact_error(grid, ratio, 1.0, 0.0), rel=0.03
        )


def test_a_bulk_far_from_zero_takes_the_exact_way():
    grid = Grid("int4", False)
    assert gaussian_error(grid, 70.0, 1.0, 60.0) == exact_error(grid, 70.0, 1.0, 60.0)
    assert gaussian_error(grid, 70.0, 0.0, 61.0) == pytest.approx(1.0)  # the nearest multiple of 10 is 60


def test_a_center_beyond_the_largest_magnitude_is_no_failure():
    assert math.isfinite(gaussian_error(Grid("int8", False), 1.0, 0.01, 40.0))
    assert math.isfinite(gaussian_error(Grid("int8", False), 1.0, 2.0, 1.5))


@pytest.mark.parametrize("absmax", [1e-30, 1e30])
def test_it_scales_with_the_square(absmax):
    grid = Grid("e4m3", False)
    small = gaussian_error(grid, 1.0, 0.1, 0.02)
    assert gaussian_error(grid, absmax, 0.1 * absmax, 0.02 * absmax) == pytest.approx(
        small * absmax**2, rel=1e-9
    )


def test_beyond_the_table_its_end_stands():
    grid = Grid("int8", False)
    assert gaussian_error(grid, 2.0**40, 1.0, 0.0) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("least", [0.0, 0.5, 0.9])
def test_even_magnitudes_err_as_the_quantizer_does(grid, least):
    x = np.linspace(least, 1.0, 300_001) * 5
    assert even_error(grid, 5.0, 5 * least) == pytest.approx(measured(x, grid), rel=0.02)


def test_the_largest_magnitude_itself_does_not_err():
    assert even_error(Grid("e4m3", False), 3.0, 3.0) < 1e-7
