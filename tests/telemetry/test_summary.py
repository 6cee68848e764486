import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.telemetry.overflow.counters import ROLES, LayerOverflow, OperandCounts
from megalowbit.telemetry.summary import RunSummary, RunTotals, worst_layers


def layer(name, role, saturated, underflow, squared_error):
    counts = OperandCounts(
        elements=1000,
        saturated=saturated,
        underflow=underflow,
        squared_error=squared_error,
        squared_norm=100.0,
    )
    return LayerOverflow(layer=name, role=role, counts=counts)


SPEED = ("TFLOP/s", "412.3 per device", "MFU", "41.68%")
ROW = ("low bits", "71.25% of products", "verified", "12,000, 75.00% hits")


def full_summary():
    totals = RunTotals()
    for step in range(1, 501):
        totals.add_step(loss=6 - step / 200, tokens=4096, seconds=0.4, is_skipped=step in (3, 4))
    overflow = OperandCounts(
        elements=5_000_000_000_000,
        saturated=12_500_000_000,
        underflow=9,
        nonfinite=77,
        quantizations=1_000_000,
        quantizations_with_overflow=150_000,
    )
    layers = [
        layer(f"model.decoder.transformer.layers.{n}.feed_forward.{end}", role, n, 90 - n, 0.1 + n)
        for n in range(96)
        for end in ("up_projection", "down_projection")
        for role in ROLES
    ]
    return RunSummary(
        totals=totals,
        tokens_per_second=10_240.0,
        overflow=overflow,
        worst=worst_layers(layers),
        rows=[ROW, SPEED],
    )


def test_totals_are_those_of_the_steps():
    totals = RunTotals()
    for loss, is_skipped in ((5.0, False), (1.0, True), (math.nan, False), (4.0, False), (4.5, False)):
        totals.add_step(loss=loss, tokens=100, seconds=0.5, is_skipped=is_skipped)
    assert (totals.steps, totals.skipped_steps, totals.tokens, totals.seconds) == (5, 1, 500, 2.5)
    assert (totals.final_loss, totals.best_loss, totals.best_step) == (4.5, 4.0, 4)


def test_a_speed_of_a_part_of_the_run_says_so():
    totals = RunTotals()
    for _ in range(30):
        totals.add_step(loss=1.0, tokens=100, seconds=0.5, is_skipped=False)
    of_a_part = RunSummary(totals=totals, tokens_per_second=200.0, timed_steps=8).render()
    assert "tokens/s       200 (last 8 steps)" in of_a_part
    assert "time in steps  " in of_a_part
    assert "last" not in RunSummary(totals=totals, tokens_per_second=200.0, timed_steps=29).render()


@given(st.lists(st.tuples(st.floats(), st.booleans()), max_size=20), st.integers(0, 20))
def test_a_resumed_run_ends_with_the_same_totals(steps, cut):
    whole, before, after = RunTotals(), RunTotals(), RunTotals()
    for number, (loss, is_skipped) in enumerate(steps):
        if number == cut:
            after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        for totals in (whole, before if number < cut else after):
            totals.add_step(loss=loss, tokens=7, seconds=0.25, is_skipped=is_skipped)
    resumed = after if len(steps) > cut else before
    assert repr(resumed) == repr(whole)


def test_what_parts_of_a_run_add_is_in_the_file_and_on_the_screen(tmp_path):
    path = tmp_path / "summary.json"
    entries = {"splits": {"cold": 16, "warm": 9584}, "late_switch": {"step": 90, "loss_after": None}}
    summary = RunSummary(totals=RunTotals(), entries=entries, rows=[ROW])
    summary.write(path)
    stored = json.loads(path.read_text())
    assert {name: stored[name] for name in entries} == entries
    assert list(stored)[-4:] == ["worst_layers", "overflows", *entries]
    (row,) = [line for line in summary.render().splitlines() if line.startswith("low bits")]
    assert row == "low bits    71.25% of products          verified       12,000, 75.00% hits"
    RunSummary(totals=RunTotals()).write(path)
    assert list(json.loads(path.read_text()))[-2:] == ["worst_layers", "overflows"]
    assert "low bits" not in RunSummary(totals=RunTotals()).render()


def test_worst_layers_are_found_by_measure_and_role():
    rows = [
        layer("a", "grad_output", 50, 1, 1.0),
        layer("b", "grad_output", 10, 300, 1.0),
        layer("c", "grad_output", 0, 2, 10.0),
        layer("d", "weight", 1, 1, 1.0),
    ]
    found = {(row.role, row.measure): (row.layer, row.value, row.all_layers) for row in worst_layers(rows)}
    assert found[("grad_output", "saturation")] == ("a", 0.05, 60 / 3000)
    assert found[("grad_output", "underflow")] == ("b", 0.3, 303 / 3000)
    name, there, everywhere = found[("grad_output", "snr_db")]
    assert (name, there) == ("c", pytest.approx(10))
    assert everywhere == pytest.approx(10 * math.log10(300 / 12))
    assert found[("weight", "saturation")][0] == "d"
    assert not [key for key in found if key[0] == "input"]


def test_the_screen_shows_the_figures_within_24_lines_of_80_characters():
    text = full_summary().render()
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert text.isascii()
    for figure in (
        "12,500,000,000 of 5,000,000,000,000 elements",
        "0.25%",
        "150,000 of 1,000,000 quantisations",
        "15.00%",
        "2,048,000",
        "3.5000 (step 500)",
        "10.2k",
        "0:03:20",
        "..ers.95.feed_forward.up_projection",
        "500 (2 skipped)",
    ):
        assert figure in text, figure


def test_a_run_without_a_step_or_tracker_still_has_a_summary(tmp_path):
    summary = RunSummary(totals=RunTotals())
    assert "saturated" not in summary.render()
    summary.write(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["final_loss"] is None


def test_the_file_holds_the_same_figures(tmp_path):
    path = tmp_path / "summary.json"
    full_summary().write(path)
    stored = json.loads(path.read_text())
    assert stored["steps"] == 500
    assert stored["skipped_steps"] == 2
    assert stored["gradient_overflow/total_overflow_elements"] == 12_500_000_000
    assert stored["gradient_overflow/batch_overflow_rate"] == 0.15
    assert len(stored["worst_layers"]) == 9
    assert stored["worst_layers"][0]["role"] == "grad_output"


def test_figures_of_some_steps_are_not_shown_as_those_of_the_run(tmp_path):
    totals = RunTotals(steps=71, tokens=1, seconds=1.0)
    counts = OperandCounts(elements=800, saturated=20, quantizations=8, quantizations_with_overflow=4)
    some = RunSummary(totals=totals, overflow=counts, counted_steps=8)
    assert "quantised output gradients, over 8 counted steps" in some.render()
    assert some.facts()["gradient_overflow/counted_steps"] == 8
    assert some.facts()["gradient_overflow/element_overflow_rate"] == 20 / 800
    every = RunSummary(totals=totals, overflow=counts, counted_steps=71)
    assert "quantised output gradients, over the run" in every.render()


def test_a_final_loss_of_nan_keeps_the_file_valid(tmp_path):
    totals = RunTotals()
    totals.add_step(loss=math.nan, tokens=1, seconds=1.0, is_skipped=False)
    RunSummary(totals=totals).write(tmp_path / "summary.json")
    text = (tmp_path / "summary.json").read_text()
    stored = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert stored["final_loss"] is None
    assert stored["nonfinite"] == {"final_loss": "nan"}
    assert "nan" in RunSummary(totals=totals).render()


def test_the_summary_says_where_gradients_overflowed_also_after_a_resume(tmp_path):
    totals = RunTotals()
    places = [None, ("wte", 0), ("wte", 0), ("h.0", 3), None, ("wte", 1), ("wte", 0)]
    for place in places:
        totals.add_step(loss=1.0, tokens=1, seconds=1.0, is_skipped=place is not None, overflow=place)
    resumed = RunTotals()
    resumed.load_state_dict(json.loads(json.dumps(totals.state_dict())))
    assert resumed == totals
    RunSummary(totals=resumed).write(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["overflows"] == [
        {"tensor": "wte", "rank": 0, "steps": 3, "first_step": 2, "last_step": 7},
        {"tensor": "h.0", "rank": 3, "steps": 1, "first_step": 4, "last_step": 4},
        {"tensor": "wte", "rank": 1, "steps": 1, "first_step": 6, "last_step": 6},
    ]


def test_totals_of_earlier_versions_have_no_places():
    state = RunTotals(steps=4, skipped_steps=1).state_dict()
    del state["overflows"]
    totals = RunTotals()
    totals.load_state_dict(state)
    assert (totals.steps, totals.overflows) == (4, [])
