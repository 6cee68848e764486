"""Tables by layer: differences of totals, sampling without a loss, damaged lines."""

import json
import math

import numpy as np
import pytest
from made_runs import write_checks, write_layers

from megalowbit.records.tables import read_checks, read_grids, read_sampled


def lines(path, *texts):
    path.write_text("".join(texts))
    return path


def test_grids_show_what_was_counted_between_two_tables(tmp_path):
    rows = [
        {"step": step, "layer": "h.0", "role": "input", "elements": elements, "saturated": saturated,
         "underflow": 0, "nonfinite": 0, "squared_error": error, "squared_norm": norm}
        for step, elements, saturated, error, norm in ((10, 100, 10, 1.0, 10.0), (20, 300, 10, 2.0, 110.0))
    ]  # fmt: skip
    lines(tmp_path / "overflow_layers.jsonl", *(json.dumps(row) + "\n" for row in rows))
    grids = read_grids(tmp_path, [])
    assert grids.layers == ["h.0"]
    assert grids.columns == [10, 20]
    assert grids.cells["saturation"]["input"].tolist() == [[10.0, 0.0]]
    assert grids.cells["snr"]["input"][0] == pytest.approx([10.0, 20.0])
    assert np.isnan(grids.cells["snr"]["weight"]).all()


def test_totals_that_fall_are_counted_from_the_start(tmp_path):
    rows = [
        {"step": step, "layer": "h.0", "role": "input", "elements": elements, "saturated": saturated,
         "underflow": 0, "nonfinite": 0, "squared_error": 1.0, "squared_norm": 1.0}
        for step, elements, saturated in ((10, 100, 10), (20, 50, 25))
    ]  # fmt: skip
    lines(tmp_path / "overflow_layers.jsonl", *(json.dumps(row) + "\n" for row in rows))
    assert read_grids(tmp_path, []).cells["saturation"]["input"].tolist() == [[10.0, 50.0]]


def test_sampled_tables_lose_no_counts(tmp_path):
    write_layers(tmp_path, steps=5000, every=10, layers=2)
    sampled = read_sampled(tmp_path / "overflow_layers.jsonl", [], ("layer", "role"), columns=7)
    assert len(sampled.steps) == 7
    assert (sampled.steps[0], sampled.steps[-1], sampled.num_steps) == (10, 5000, 500)
    assert {len(rows) for rows in sampled.rows} == {6}
    grids = read_grids(tmp_path, [])
    assert len(grids.columns) == 240
    assert grids.cells["saturation"]["weight"][1] == pytest.approx(np.full(240, 0.1))


def test_a_layer_that_appears_late_or_is_damaged_leaves_gaps(tmp_path):
    write_layers(tmp_path, steps=20, every=10, layers=1)
    with (tmp_path / "overflow_layers.jsonl").open("a") as file:
        file.write('{"step": 20, "layer": "late", "role": "input", "elements": 4, "saturated": 1}\n')
        file.write('{"step": 20, "layer": 7, "role": "input"}\n{"step": 20, "lay')
    grids = read_grids(tmp_path, notes := [])
    assert grids.cells["saturation"]["input"][1].tolist() == pytest.approx([math.nan, 25.0], nan_ok=True)
    assert notes == [
        "overflow_layers.jsonl ends in the middle of a line, which is left out",
        "overflow_layers.jsonl: 1 damaged line left out",
    ]
    assert read_grids(tmp_path / "nowhere", notes := []) is None
    assert notes == []


def test_checks_have_precisions_and_measured_ratios(tmp_path):
    write_checks(tmp_path, steps=100, every=10, layers=2)
    with (tmp_path / "speculation.jsonl").open("a") as file:
        row = {"step": 101, "layer": "h.0.attn", "product": "output", "precision": "bf16", "is_hit": False}
        file.write(json.dumps(row) + "\n")
    checks = read_checks(tmp_path, [])
    assert checks.candidates == ["int8", "bf16"]
    assert checks.columns == [*range(1, 101, 10), 101]
    assert checks.precision["output"][0].tolist() == [0] * 10 + [1]
    assert checks.precision["output"][1, 0] == 1
    assert checks.measured["grad_input"][0, 0] == 21.0
    assert np.isnan(checks.measured["grad_input"][1]).all()
    assert checks.misses == 1


def test_a_line_that_is_damaged_is_no_miss(tmp_path):
    write_checks(tmp_path, steps=100, every=10, layers=2)
    missed = '{"step": 101, "layer": "h.0", "product": "output", "precision": "bf16", "is_hit": false}'
    with (tmp_path / "speculation.jsonl").open("a") as file:
        file.write(f"{missed}\n{missed[:-1]}\n" + '{"step": 101, "reason": {"is_hit": false}}\n')
    checks = read_checks(tmp_path, notes := [])
    assert checks.misses == 1
    assert notes == ["speculation.jsonl: 2 damaged lines left out"]


@pytest.mark.parametrize("read", [read_grids, read_checks])
def test_a_file_without_a_whole_line_is_noted(tmp_path, read):
    for name in ("overflow_layers.jsonl", "speculation.jsonl"):
        (tmp_path / name).write_text('{"step": 1, "layer": "h.0", "is_hit": false, ...\n' * 50)
    assert read(tmp_path, notes := []) is None
    assert len(notes) == 1
    assert notes[0].endswith(": 50 damaged lines left out")
