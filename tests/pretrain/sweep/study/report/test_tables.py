"""Texts of numbers; test_analysis.py has whole tables."""

from megalowbit.pretrain.sweep.study.report.statistics import Estimate
from megalowbit.pretrain.sweep.study.report.tables import interval, markdown, signed, uncertainty


def test_an_interval_is_marked_if_it_contains_zero():
    assert interval(Estimate.of([0.01, 0.011, 0.012])) == "+0.0110 [+0.0085, +0.0135]"
    assert interval(Estimate.of([0.01, -0.01])) == "+0.0000 [-0.1271, +0.1271] ≈"
    assert interval(Estimate.of([0.01])) == "+0.0100 ?"
    assert interval(None) == "–"
    assert [uncertainty(Estimate.of(values)) for values in ([0.01, 0.011, 0.012], [0.01, -0.01], [0.01])] == [
        "",
        " ≈",
        " ?",
    ]


def test_a_number_has_its_sign_and_a_study_without_pairs_no_table():
    assert (signed(0.00126), signed(-0.5)) == ("+0.0013", "-0.5000")
    assert markdown([]) == ""
