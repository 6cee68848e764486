"""Axes: ranges, round numbers in them, and their texts."""

import numpy as np
import pytest

from megalowbit.report.drawing.axis import Axis, axis_of, number_text, ticks


def test_ticks_are_round_numbers_within_the_range():
    assert ticks(0, 1500) == [0, 500, 1000, 1500]
    assert ticks(-0.004, 0.031) == pytest.approx([0, 0.01, 0.02, 0.03])
    assert ticks(2, 2) == [2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.003, "0.003"),
        (1500, "1,500"),
        (40_000, "40k"),
        (2.5e6, "2.5M"),
        (-0.5, "−0.5"),
        (3e-5, "3e-05"),
    ],
)
def test_numbers_are_short(value, text):
    assert number_text(value) == text


def test_an_axis_shows_all_values_and_turns_logarithmic_only_for_values_far_above_the_others():
    plain = axis_of([2.0, 3.0, 5.0], base=None)
    assert plain.base == 0
    assert plain.low < 2.0 < 5.0 < plain.high
    wide = axis_of([1.0] * 9 + [1e4], base=None)
    assert wide.base == 10
    assert wide.place([wide.low, 100.0, wide.high]) == pytest.approx([0, 0.5, 1], abs=0.01)
    assert axis_of([0.0, 1.0, 1e4], base=None).base == 0  # 0 has no logarithm
    assert axis_of([np.nan, np.inf]) == Axis(0.0, 1.0)
    assert axis_of([0.0, 1.0]).low == 0.0


@pytest.mark.parametrize("base", [0, 2, 10])
def test_ticks_of_an_axis_are_inside(base):
    for low, high in ((1.0, 2.0), (1.0, 65536.0), (3e-6, 4e-3), (17.0, 17.5)):
        axis = Axis(low, high, base)
        found = axis.ticks()
        assert found
        assert all(low <= value <= high for value, _ in found)
        assert len({text for _, text in found}) == len(found)
