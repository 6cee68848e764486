"""Reads metrics.jsonl into columns: repeated, damaged and impossible steps."""

import math

import numpy as np

from megalowbit.findings.run_files import read_run
from megalowbit.findings.verdict import diagnosis_of


def test_columns_have_the_recorded_values_and_nan_is_nan(records, tmp_path):
    records.rows[4] |= {"loss": math.nan, "skipped_steps": 1, "skipped/tensor": "wte", "skipped/rank": 3}
    records.rows[5]["grad_norm"] = math.inf
    for row in records.rows[5:]:
        row["skipped_steps"] = 1
    run = records.read(tmp_path / "run")
    assert run.metrics["loss"][3] == records.rows[3]["loss"]
    assert math.isnan(run.metrics["loss"][4])
    assert run.metrics["grad_norm"][5] == math.inf
    assert np.flatnonzero(run.metrics.is_skipped).tolist() == [4]
    assert run.metrics.tensors[4] == "wte"
    assert np.isnan(run.metrics["ranks/slowest"]).all()
    assert (run.last_step, run.planned_steps, run.is_done) == (60, 60, True)


def test_the_last_line_of_a_step_counts_as_in_the_report(records, tmp_path):
    records.rows[30:30] = [{**records.rows[10], "loss": 9.0, "skipped/tensor": "wte"}]
    run = records.read(tmp_path / "run")
    assert run.metrics["loss"][10] == 9.0
    assert run.metrics.tensors[10] == "wte"
    assert run.metrics.steps.tolist() == list(range(1, 61))
    assert run.metrics["loss"][30] == records.rows[31]["loss"]
    assert run.notes == ["metrics.jsonl: 1 step occurred twice; the last line of each counts"]


def test_steps_that_no_run_can_have_are_damaged_lines(records, tmp_path):
    path = records.write(tmp_path / "run") / "metrics.jsonl"
    with path.open("a") as file:
        for step in ("9" * 400, str(2**53), "-1", "61.0", "true"):
            file.write('{"step": ' + step + ', "loss": 3.0}\n')
    verdict = diagnosis_of(read_run(tmp_path / "run"))
    assert verdict.steps == (60, 60)
    assert verdict.notes == ("metrics.jsonl: 5 damaged lines are left out, the first is 61",)
