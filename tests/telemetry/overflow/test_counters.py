import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.quantize.encoding import ERROR_NAMES
from megalowbit.telemetry.overflow.counters import TABLE_NAMES, OperandCounts, ratio

counts = st.builds(OperandCounts, **{name: st.integers(0, 2**62) for name in TABLE_NAMES})


def test_there_is_a_field_for_every_column():
    assert tuple(field.name for field in fields(OperandCounts)) == (*TABLE_NAMES, *ERROR_NAMES)


def test_rates_are_shares_of_what_they_name():
    operand = OperandCounts(
        elements=200,
        saturated=7,
        upper_half=60,
        underflow=30,
        blocks=20,
        saturated_scales=1,
        zero_blocks=5,
        quantizations=4,
        quantizations_with_overflow=3,
        squared_error=0.5,
        squared_norm=50.0,
    )
    assert operand.rates() == {
        "saturation_rate": 0.035,
        "underflow_rate": 0.15,
        "upper_half_rate": 0.3,
        "scale_saturation_rate": 0.05,
        "zero_block_rate": 0.25,
        "snr_db": pytest.approx(20.0, abs=1e-12),
    }
    assert operand.batch_rate == 0.75


def test_nothing_counted_gives_no_rate_rather_than_zero():
    assert set(OperandCounts().rates().values()) == {None}
    assert OperandCounts().batch_rate is None
    assert ratio(0, 0) is None


def test_a_lossless_operand_has_infinite_signal_to_noise():
    assert OperandCounts(squared_norm=3.0).snr_db == math.inf


def test_signal_to_noise_survives_sums_whose_quotient_overflows():
    assert OperandCounts(squared_error=1e-300, squared_norm=1e300).snr_db == pytest.approx(6000)


@given(counts, counts, counts)
def test_adding_is_exact_and_in_any_order(a, b, c):
    assert (a + b) + c == a + (c + b)
    assert (a + b).elements == a.elements + b.elements
    assert a + OperandCounts() == a


def test_a_row_of_wrong_length_is_refused():
    with pytest.raises(ValueError):
        OperandCounts.from_rows([1] * (len(TABLE_NAMES) - 1), [0.0, 0.0])
