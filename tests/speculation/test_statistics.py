import dataclasses
import math

import pytest

from megalowbit.speculation.statistics import COLUMNS, OUTLIER_SIGMAS, OperandStatistics

ROW = {
    "count": 64.0,
    "absmax": 12.0,
    "center": 0.5,
    "sigma": 2.0,
    "bulk_power": 4.25,
}


def test_columns_are_the_fields_in_the_order_of_a_row():
    assert tuple(ROW) == COLUMNS
    assert dataclasses.astuple(OperandStatistics(**ROW)) == (*ROW.values(), ())


def test_ratio_is_the_largest_magnitude_in_sigmas():
    assert OperandStatistics(**ROW).ratio == 6.0
    assert math.isnan(OperandStatistics(**{**ROW, "sigma": 0.0}).ratio)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_makes_the_row_so(column, value):
    assert OperandStatistics(**ROW).is_finite
    assert not OperandStatistics(**{**ROW, column: value}).is_finite
    assert OperandStatistics(**ROW, errors=(1.0,)).is_finite
    assert not OperandStatistics(**ROW, errors=(1.0, value)).is_finite


def test_infinities_of_both_signs_do_not_cancel():
    row = OperandStatistics(**{**ROW, "absmax": math.inf, "center": -math.inf})
    assert not row.is_finite


def test_a_row_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OperandStatistics(**ROW).sigma = 1.0


def test_a_gaussian_has_hardly_an_element_beyond():
    assert math.erfc(OUTLIER_SIGMAS / math.sqrt(2)) * 1e8 < 0.25  # of 100 million
