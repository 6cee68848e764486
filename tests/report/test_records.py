"""What is read from run folders: torn and damaged lines, values that are not finite, tables of totals."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from made_runs import write_checks, write_layers, write_run

from megalowbit.errors import UserError
from megalowbit.report.records.attempts import add_attempt, read_attempts
from megalowbit.report.records.metrics import read_metrics
from megalowbit.report.records.run import labels, read_runs
from megalowbit.report.records.tables import read_checks, read_grids, read_sampled


def lines(path, *texts):
    path.write_text("".join(texts))
    return path


def test_a_torn_last_line_and_damaged_lines_are_left_out_and_said(tmp_path):
    path = lines(
        tmp_path / "metrics.jsonl",
        '{"step": 1, "loss": 3.0}\n',
        "\x00\x00\n",
        '{"step": 2, "loss": 2.0}\n',
        '[{"step": 7}]\n',
        '{"step": true, "loss": 1.0}\n',
        "[" * 50_000 + "\n",
        '{"step": 3, "loss": 1.',
    )
    found = read_metrics(path)
    assert found.column("loss").values.tolist() == [3.0, 2.0]
    assert found.notes == (
        "line 2 and 3 more of metrics.jsonl are damaged and left out.",
        "The last line of metrics.jsonl is not complete and left out.",
    )


def test_values_without_a_word_in_json_are_not_finite_and_known_by_step(tmp_path):
    path = lines(
        tmp_path / "metrics.jsonl",
        '{"step": 1, "loss": null, "nonfinite": {"loss": "nan"}, "grad_norm": null}\n',
        '{"step": 2, "loss": Infinity, "grad_norm": 1.0}\n',
        f'{{"step": 3, "loss": {"9" * 400}, "skipped/tensor": "a.weight"}}\n',
        '{"step": 4, "loss": 2.5}\n',
    )
    found = read_metrics(path)
    assert found.nonfinite["loss"].tolist() == [1, 2, 3]
    assert "grad_norm" not in found.nonfinite  # unknown in a skipped step, not infinite
    assert found.column("loss").finite().steps.tolist() == [4]
    assert found.column("loss").last == 2.5
    assert found.texts["skipped/tensor"] == {3: "a.weight"}
    assert not found.column("no such column")


def test_steps_that_occur_twice_or_not_at_all_are_said(tmp_path):
    path = lines(
        tmp_path / "metrics.jsonl", *(f'{{"step": {step}, "loss": {n}}}\n' for n, step in enumerate([3, 4, 4, 9]))
    )
    found = read_metrics(path)
    assert found.column("loss").values.tolist() == [0, 2, 3]
    assert found.notes == (
        "1 step occurred twice; the last line of each counts.",
        "6 steps up to step 9 have no line.",
    )


@pytest.mark.parametrize("text", ["", '{"loss": 1.0}\n', "no json\n", '{"step": 1'])
def test_a_file_without_a_step_is_one_message(tmp_path, text):
    with pytest.raises(UserError, match=r"metrics.jsonl (is empty|has no complete line with a step): wait for"):
        read_metrics(lines(tmp_path / "metrics.jsonl", text))


def test_grids_show_what_was_counted_between_two_tables(tmp_path):
    rows = [
        {"step": step, "layer": "h.0", "role": "input", "elements": elements, "saturated": saturated, "underflow": 0,
         "nonfinite": 0, "squared_error": error, "squared_norm": norm}
        for step, elements, saturated, error, norm in ((10, 100, 10, 1.0, 10.0), (20, 300, 10, 2.0, 110.0))
    ]  # fmt: skip
    lines(tmp_path / "overflow_layers.jsonl", *(json.dumps(row) + "\n" for row in rows))
    grids = read_grids(tmp_path)
    assert grids.layers == ["h.0"]
    assert grids.columns == [10, 20]
    assert grids.cells["saturation"]["input"].tolist() == [[10.0, 0.0]]
    assert grids.cells["snr"]["input"][0] == pytest.approx([10.0, 20.0])
    assert np.isnan(grids.cells["snr"]["weight"]).all()


def test_totals_that_fall_are_counted_from_the_start(tmp_path):
    rows = [
        {"step": step, "layer": "h.0", "role": "input", "elements": elements, "saturated": saturated, "underflow": 0,
         "nonfinite": 0, "squared_error": 1.0, "squared_norm": 1.0}
        for step, elements, saturated in ((10, 100, 10), (20, 50, 25))
    ]  # fmt: skip
    lines(tmp_path / "overflow_layers.jsonl", *(json.dumps(row) + "\n" for row in rows))
    assert read_grids(tmp_path).cells["saturation"]["input"].tolist() == [[10.0, 50.0]]


def test_sampled_tables_lose_no_counts(tmp_path):
    write_layers(tmp_path, steps=5000, every=10, layers=2)
    sampled = read_sampled(tmp_path / "overflow_layers.jsonl", columns=7)
    assert len(sampled.steps) == 7
    assert (sampled.steps[0], sampled.steps[-1], sampled.num_steps) == (10, 5000, 500)
    assert {len(rows) for rows in sampled.rows} == {6}
    grids = read_grids(tmp_path)
    assert len(grids.columns) == 240
    assert grids.cells["saturation"]["weight"][1] == pytest.approx(np.full(240, 0.1))


def test_a_layer_that_appears_late_or_is_damaged_leaves_gaps(tmp_path):
    write_layers(tmp_path, steps=20, every=10, layers=1)
    with (tmp_path / "overflow_layers.jsonl").open("a") as file:
        file.write('{"step": 20, "layer": "late", "role": "input", "elements": 4, "saturated": 1}\n')
        file.write('{"step": 20, "layer": 7, "role": "input"}\n{"step": 20, "lay')
    grids = read_grids(tmp_path)
    assert grids.cells["saturation"]["input"][1].tolist() == pytest.approx([math.nan, 25.0], nan_ok=True)
    assert "2 damaged lines" in grids.note
    assert read_grids(tmp_path / "nowhere") is None


def test_checks_have_precisions_and_measured_ratios(tmp_path):
    write_checks(tmp_path, steps=100, every=10, layers=2)
    with (tmp_path / "speculation.jsonl").open("a") as file:
        row = {"step": 101, "layer": "h.0.attn", "product": "output", "precision": "bf16", "is_hit": False}
        file.write(json.dumps(row) + "\n")
    checks = read_checks(tmp_path)
    assert checks.candidates == ["int8", "bf16"]
    assert checks.columns == [*range(1, 101, 10), 101]
    assert checks.precision["output"][0].tolist() == [0] * 10 + [1]
    assert checks.precision["output"][1, 0] == 1
    assert checks.measured["grad_input"][0, 0] == 21.0
    assert np.isnan(checks.measured["grad_input"][1]).all()
    assert checks.misses == 1


def test_attempts_are_lines_and_torn_ones_are_left_out(tmp_path):
    add_attempt(tmp_path, {"after_step": 0, "host": "a"})
    add_attempt(tmp_path, {"after_step": 6, "host": Path("b")})
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"after_')
    assert read_attempts(tmp_path) == [{"after_step": 0, "host": "a"}, {"after_step": 6, "host": "b"}]
    assert read_attempts(tmp_path / "nowhere") == []


def test_runs_are_named_by_as_few_parts_of_their_paths_as_tell_them_apart():
    assert labels([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert labels([Path("/one/run"), Path("/two/run")]) == ["one/run", "two/run"]


def test_the_state_of_a_run(tmp_path):
    write_run(tmp_path / "done", 20)
    write_run(tmp_path / "going", 20, changes={"megalowbit.run.steps": 50}, is_done=False)
    done, going = read_runs([tmp_path / "done", tmp_path / "going"])
    assert done.state == "finished after 20 steps"
    assert going.state.startswith("not finished: step 20 of 50, last record 0 s")
    assert going.tokens_per_step == 512
    assert done.setting("optimizer.params.lr") == 0.003
    assert done.setting("optimizer.params.lr.no", "nothing") == "nothing"
