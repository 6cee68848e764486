"""Reports are plain values: comparable, frozen, and fit for JSON."""

import dataclasses
import json

import pytest

from megalowbit.speculation.report import Change, GemmRow, SpeculationReport, SpeculationTotals

ROW = GemmRow(layer="h.0", product="output", precision="int8", predicted_db=21.5, reason="safe")


def test_what_was_not_found_is_none_not_a_number():
    for name in ("measured_db", "is_hit", "left_ratio", "right_ratio"):
        assert getattr(ROW, name) is None


def test_a_report_goes_into_json_and_says_the_same_there():
    change = Change(layer="h.0", product="output", before="int8", after="bf16", reason="missed")
    report = SpeculationReport(step=3, rows=(ROW,), changes=(change,), shares={"int8": 1.0}, misses=1)
    read = json.loads(json.dumps(dataclasses.asdict(report), allow_nan=False))
    assert GemmRow(**read["rows"][0]) == ROW
    assert Change(**read["changes"][0]) == change
    assert (read["step"], read["shares"], read["hits"], read["misses"]) == (3, {"int8": 1.0}, 0, 1)


@pytest.mark.parametrize(("hits", "misses", "rate"), [(3, 1, 0.75), (0, 2, 0.0), (0, 0, None)])
def test_the_hit_rate_is_a_share_of_what_was_verified(hits, misses, rate):
    assert SpeculationTotals(shares={}, share_8bit=0.0, hits=hits, misses=misses).hit_rate == rate


def test_reports_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROW.precision = "bf16"
