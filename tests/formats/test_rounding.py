import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.formats.element import E2M1
from megalowbit.formats.rounding import round_nearest_even, round_stochastic

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_by_distance(x: float) -> float:
    """Nearest grid value by exact distances; of two equally near ones that with the even code."""
    best = min(range(8), key=lambda code: (abs(abs(x) - GRID[code]), code % 2))
    return math.copysign(GRID[best], x)


def test_all_e2m1_thresholds_and_their_fp32_neighbours_round_exactly():
    thresholds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, 0.5, 1.0, 3.0])
    above = torch.nextafter(thresholds, torch.tensor(math.inf))
    below = torch.nextafter(thresholds, torch.tensor(-math.inf))
    x = torch.cat([thresholds, above, below])
    x = torch.cat([x, -x])
    assert round_nearest_even(x, E2M1).tolist() == [nearest_by_distance(v) for v in x.tolist()]


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_nearest_rounding_equals_the_nearest_grid_value(values):
    rounded = round_nearest_even(torch.tensor(values, dtype=torch.float32), E2M1)
    assert rounded.tolist() == [nearest_by_distance(v) for v in values]


@pytest.mark.parametrize("element_count", [0, 1, 7])
def test_rounding_keeps_shape_and_input(element_count):
    x = torch.randn(element_count, 3, 2)
    before = x.clone()
    uniform = torch.rand(x.shape)
    assert round_nearest_even(x, E2M1).shape == x.shape
    assert round_stochastic(x, E2M1, uniform).shape == x.shape
    assert torch.equal(x, before)


def test_infinity_saturates_and_nan_stays_nan():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30])
    for rounded in (round_nearest_even(x, E2M1), round_stochastic(x, E2M1, torch.zeros(4))):
        assert rounded[[0, 1, 3]].tolist() == [6, -6, 6]
        assert rounded[2].isnan()


def test_stochastic_rounding_never_moves_a_grid_value():
    x = torch.tensor(GRID + [-v for v in GRID])
    for u in (0.0, 0.5, 1 - 2.0**-24):
        assert torch.equal(round_stochastic(x, E2M1, torch.full_like(x, u)), x)


def test_stochastic_rounding_goes_up_exactly_below_the_fraction():
    for low, high in itertools.pairwise(GRID):
        for fraction in (0.125, 0.5, 0.8125):
            x = low + fraction * (high - low)
            just_below, at = fraction - 2.0**-20, fraction + 2.0**-20
            assert round_stochastic(torch.tensor([x]), E2M1, torch.tensor([just_below])).item() == high
            assert round_stochastic(torch.tensor([x]), E2M1, torch.tensor([at])).item() == low
            # a negative number goes towards zero with that probability's complement: up is up
            assert round_stochastic(torch.tensor([-x]), E2M1, torch.tensor([1 - at])).item() == -low
            assert round_stochastic(torch.tensor([-x]), E2M1, torch.tensor([1 - just_below])).item() == -high


@pytest.mark.parametrize("x", [0.1, 0.49, 0.75, 1.3, 1.9, 2.2, 3.7, 4.1, 5.9, -0.3, -2.7, -5.5])
def test_stochastic_rounding_has_the_right_probability_and_mean(x):
    n = 400_000
    generator = torch.Generator().manual_seed(7)
    rounded = round_stochastic(torch.full((n,), x), E2M1, torch.rand(n, generator=generator))
    low = max(v for v in [*GRID, *(-g for g in GRID)] if v <= x)
    high = min(v for v in [*GRID, *(-g for g in GRID)] if v >= x)
    probability = (x - low) / (high - low)
    assert set(rounded.unique().tolist()) == {low, high}
    deviation = math.sqrt(probability * (1 - probability) / n)
    assert abs((rounded == high).double().mean().item() - probability) < 5 * deviation
    assert abs(rounded.double().mean().item() - x) < 5 * deviation * (high - low)


@given(st.floats(-6, 6, width=32), st.floats(0, 1, exclude_max=True, width=32))
@settings(max_examples=200, deadline=None)
def test_stochastic_rounding_only_chooses_a_neighbour(x, u):
    rounded = round_stochastic(torch.tensor([x]), E2M1, torch.tensor([u])).item()
    values = sorted([*GRID, *(-g for g in GRID)])
    slack = 2.0**-21  # a number within fp32's reach of a grid value counts as on it
    lowest = max((v for v in values if v <= x - slack), default=-6)
    highest = min((v for v in values if v >= x + slack), default=6)
    assert rounded in values
    assert lowest <= rounded <= highest
