import math

import pytest
import torch

from megalowbit.formats.element import E2M1, E3M2, E4M3, E5M2, ELEMENTS, INT4, INT8, TERNARY

EVERY_ELEMENT = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)


def test_e2m1_lists_its_sixteen_numbers_by_code():
    assert E2M1.code_values()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1.code_values()[9:] == [-0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize(
    ("element", "largest", "smallest", "count"),
    [
        (E2M1, 6, 0.5, 8),
        (E3M2, 28, 2.0**-4, 32),
        (E4M3, 448, 2.0**-9, 127),
        (E5M2, 57344, 2.0**-16, 124),
        (INT8, 127, 1, 128),
        (INT4, 7, 1, 8),
        (TERNARY, 1, 1, 2),
    ],
)
def test_largest_and_smallest_numbers_are_those_of_the_specification(element, largest, smallest, count):
    assert (element.max, element.grid[1], len(element.grid)) == (largest, smallest, count)


@pytest.mark.parametrize(
    ("element", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)], ids=["e4m3", "e5m2"]
)
def test_eight_bit_codes_stand_for_what_torchs_float8_stands_for(element, dtype):
    theirs = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    ours = torch.tensor(element.code_values(), dtype=torch.float64)
    is_used = theirs.isfinite()
    assert torch.equal(ours[is_used], theirs[is_used])
    assert ours[~is_used].isnan().all()


def test_e3m2_holds_every_number_of_three_exponent_and_two_mantissa_bits():
    subnormal = [m / 4 * 2.0**-2 for m in range(4)]
    assert list(E3M2.grid) == subnormal + [
        (1 + m / 4) * 2.0 ** (e - 3) for e in range(1, 8) for m in range(4)
    ]


@EVERY_ELEMENT
def test_codes_fit_their_bits_with_the_sign_on_top(element):
    values = element.code_values()
    assert len(values) == 2**element.bits
    assert element.sign_code * 2 == 2**element.bits
    for code, magnitude in enumerate(element.grid):
        assert values[code] == magnitude
        assert values[code + element.sign_code] == -magnitude


@EVERY_ELEMENT
def test_magnitudes_rise_by_powers_of_two_and_thresholds_lie_between(element):
    for low, threshold, high in zip(element.grid, element.thresholds, element.grid[1:], strict=False):
        assert math.frexp(high - low)[0] == 0.5
        assert threshold - low == high - threshold > 0


@EVERY_ELEMENT
def test_knots_map_each_grid_value_to_its_code_and_straight_lines_between(element):
    def position(x):
        return sum(weight * min(x, bound) for bound, weight in element.knots)

    for code, (low, high) in enumerate(zip(element.grid, element.grid[1:], strict=False)):
        assert position(low) == code
        assert position(low + 0.25 * (high - low)) == code + 0.25
    assert position(2 * element.max) == len(element.grid) - 1
