import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.telemetry.overflow.exact_sum import (
    LARGEST,
    digits_of,
    from_float,
    make_scales,
    to_float,
    whole,
)

UNIT = Fraction(1, 2**288)
SCALES = make_scales(torch.device("cpu"))


def digits(values):
    return digits_of(torch.tensor(values, dtype=torch.float64), SCALES)


@given(st.floats(min_value=2.0**-236, max_value=LARGEST))  # all bits of these lie within
def test_a_number_is_what_its_digits_stand_for(value):
    (row,) = digits([value]).tolist()
    assert all(0 <= digit < 2**32 for digit in row)
    assert whole(row) * UNIT == Fraction(value)
    assert from_float(value) == whole(row)
    assert to_float(whole(row)) == value


@given(st.floats(min_value=0.0, max_value=2.0**-236))
def test_what_lies_below_is_cut_off(value):
    (row,) = digits([value]).tolist()
    assert whole(row) == from_float(value)
    assert 0 <= Fraction(value) - whole(row) * UNIT < UNIT


def test_what_lies_above_counts_as_the_largest():
    assert [whole(row) * UNIT for row in digits([1e300, math.inf]).tolist()] == [Fraction(LARGEST)] * 2


def test_sums_are_exact_in_any_order_and_any_parts():
    source = random.Random(0)
    values = [source.random() * 2.0 ** source.randint(-150, 250) for _ in range(500)]
    rounded = {sum(source.sample(values, len(values))) for _ in range(20)}
    assert len(rounded) > 1  # or there would be nothing to do
    rows = digits(values)
    assert to_float(whole(rows.sum(0).tolist())) == math.fsum(values)
    parts = [whole(part.sum(0).tolist()) for part in rows[torch.randperm(500)].split([1, 200, 299])]
    assert to_float(sum(parts)) == math.fsum(values)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_refused(value):
    with pytest.raises((ValueError, OverflowError)):
        from_float(value)
