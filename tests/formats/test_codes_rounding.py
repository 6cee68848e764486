import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.formats.codes import code_values, nearest_codes, stochastic_codes
from megalowbit.formats.element import E2M1, ELEMENTS

EVERY_ELEMENT = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_by_distance(x: float, element=E2M1) -> int:
    """Code of the nearest grid value by exact distances; of two equally near ones the even code."""
    magnitude = min(abs(x), element.max)
    code = min(range(len(element.grid)), key=lambda c: (abs(magnitude - element.grid[c]), c % 2))
    return code + element.sign_code * (math.copysign(1, x) < 0)


def stochastic_by_definition(x: float, random: int, element) -> int:
    """By exact fractions; x and the fractions must be short enough for fp32."""
    magnitude = min(abs(x), element.max)
    low = max(code for code, value in enumerate(element.grid) if value <= magnitude)
    if low + 1 < len(element.grid):
        fraction = (magnitude - element.grid[low]) / (element.grid[low + 1] - element.grid[low])
        low += fraction + random / 2**24 >= 1
    return low + element.sign_code * (math.copysign(1, x) < 0)


def stochastic(x, random, element=E2M1):
    numbers = torch.as_tensor(x, dtype=torch.float32)
    return stochastic_codes(numbers, torch.full(numbers.shape, random, dtype=torch.int32), element)


@EVERY_ELEMENT
def test_all_thresholds_grid_values_and_their_fp32_neighbours_round_to_the_nearest(element):
    points = torch.tensor([*element.grid, *element.thresholds, 2 * element.max], dtype=torch.float32)
    above = torch.nextafter(points, torch.tensor(math.inf))
    below = torch.nextafter(points, torch.tensor(-math.inf))
    x = torch.cat([points, above, below])
    x = torch.cat([x, -x])
    assert nearest_codes(x, element).tolist() == [nearest_by_distance(v, element) for v in x.tolist()]


@EVERY_ELEMENT
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_nearest_rounding_equals_the_nearest_grid_value(element, data):
    bound = 1.2 * element.max
    values = data.draw(st.lists(st.floats(-bound, bound).map(lambda v: float(torch.tensor(v))), min_size=1))
    rounded = nearest_codes(torch.tensor(values, dtype=torch.float32), element)
    assert rounded.tolist() == [nearest_by_distance(v, element) for v in values]


@EVERY_ELEMENT
def test_stochastic_rounding_equals_its_definition(element):
    fractions = [0, 2.0**-16, 3 / 512, 0.125, 0.5, 0.8125, 255 / 256, 1 - 2.0**-16]
    steps = list(itertools.pairwise(element.grid))
    steps = steps if len(steps) < 16 else [*steps[:9], *steps[-7:]]
    x = [low + fraction * (high - low) for low, high in steps for fraction in fractions] + [2 * element.max]
    x += [-v for v in x]
    assert torch.tensor(x).double().tolist() == x
    for fraction in fractions:  # for each the first random number that raises it, and the last that does not
        for random in {int((1 - fraction) * 2**24) - below for below in (0, 1)} - {2**24}:
            expected = [stochastic_by_definition(v, random, element) for v in x]
            assert stochastic(x, random, element).tolist() == expected


@EVERY_ELEMENT
def test_stochastic_rounding_never_moves_a_grid_value(element):
    codes = torch.tensor([c for c, v in enumerate(element.code_values()) if not math.isnan(v)])
    x = code_values(codes, element)
    for random in (0, 2**23, 2**24 - 1):
        assert torch.equal(stochastic(x, random, element).int(), codes.int())


@given(st.floats(-7, 7, width=32), st.integers(0, 2**24 - 1))
@settings(max_examples=200, deadline=None)
def test_stochastic_rounding_of_e2m1_follows_its_formula_in_fp32(x, random):
    y = torch.tensor(x).abs().clamp(max=6)
    t = torch.minimum(torch.minimum(y + y, y + 2), y * 0.5 + 4)
    code = math.floor(t.item() + random / 2**24)  # exact in fp64
    assert stochastic([x], random).item() == code + 8 * (math.copysign(1, x) < 0)


@pytest.mark.parametrize("x", [0.1, 0.49, 0.75, 1.3, 1.9, 2.2, 3.7, 4.1, 5.9, -0.3, -2.7, -5.5])
def test_over_all_random_numbers_stochastic_rounding_has_the_right_probability_and_mean(x):
    every = torch.arange(0, 2**24, 2**12, dtype=torch.int32)  # of the upper 12 bits
    rounded = code_values(stochastic_codes(torch.full(every.shape, x), every, E2M1), E2M1)
    low = max(v for v in GRID if v <= abs(x))
    high = min(v for v in GRID if v >= abs(x))
    assert set(rounded.abs().tolist()) == {low, high}
    assert (rounded.abs() == high).double().mean().item() == pytest.approx(
        (abs(x) - low) / (high - low), abs=2.0**-12
    )
    assert rounded.double().mean().item() == pytest.approx(x, abs=(high - low) * 2.0**-12)


def test_infinity_saturates_zero_keeps_its_sign_and_nan_becomes_code_0():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30, 0.0, -0.0, -1e-30])
    for codes in (nearest_codes(x, E2M1), stochastic(x, 0)):
        assert codes.tolist() == [7, 15, 0, 7, 0, 8, 8]


@pytest.mark.parametrize("element_count", [0, 1, 7])
def test_rounding_keeps_shape_and_input(element_count):
    x = torch.randn(element_count, 3, 2)
    before = x.clone()
    random = torch.zeros(x.shape, dtype=torch.int32)
    for codes in (nearest_codes(x, E2M1), stochastic_codes(x, random, E2M1)):
        assert codes.shape == x.shape
        assert codes.dtype == torch.uint8
        assert code_values(codes, E2M1).shape == x.shape
    assert torch.equal(x, before)
