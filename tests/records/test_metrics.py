"""metrics.jsonl: torn and damaged lines, values that are not finite, steps twice or not at all."""

import math
from pathlib import Path

import numpy as np
import pytest

from megalowbit.errors import UserError
from megalowbit.records.metrics import read_metrics


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
        "metrics.jsonl ends in the middle of line 7, which is left out",
        "metrics.jsonl: 4 damaged lines left out, the first is line 2",
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
        tmp_path / "metrics.jsonl",
        *(f'{{"step": {step}, "loss": {n}}}\n' for n, step in enumerate([3, 4, 4, 9])),
    )
    found = read_metrics(path)
    assert found.column("loss").values.tolist() == [0, 2, 3]
    assert found.notes == (
        "metrics.jsonl: 1 step occurred twice; the last line of each counts",
        "metrics.jsonl: 6 steps up to step 9 have no line",
    )


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (None, "metrics.jsonl is missing, so no step is known"),
        ("", "metrics.jsonl is empty"),
        ('{"loss": 1.0}\n', "metrics.jsonl: 1 damaged line left out, the first is line 1"),
        ("no json\n", "metrics.jsonl: 1 damaged line left out, the first is line 1"),
        ('{"step": 1', "metrics.jsonl ends in the middle of line 1, which is left out"),
    ],
)
def test_a_file_without_a_step_has_no_rows_and_says_why(tmp_path, text, note):
    path = tmp_path / "metrics.jsonl"
    found = read_metrics(path if text is None else lines(path, text))
    assert (len(found), found.last_step, found.notes) == (0, 0, (note,))
    assert len(found["loss"]) == len(found.skipped) == len(found.is_skipped) == 0


def test_columns_by_row_are_nan_where_a_step_has_no_value(tmp_path):
    path = lines(
        tmp_path / "metrics.jsonl",
        '{"step": 1, "loss": 3.0, "skipped_steps": 1}\n',
        '{"step": 2, "skipped_steps": -7, "validation/loss": 2.5}\n',
        '{"step": 3, "loss": null, "nonfinite": {"loss": "-inf"}, "skipped_steps": 1}\n',
        '{"step": 4, "loss": 1e-300, "skipped_steps": 3}\n',
    )
    found = read_metrics(path)
    assert found["loss"].tolist() == pytest.approx([3.0, math.nan, -math.inf, 0.0], nan_ok=True)
    assert found["validation/loss"].tolist() == pytest.approx([math.nan, 2.5] + 2 * [math.nan], nan_ok=True)
    assert np.isnan(found["no such column"]).all()
    assert found.is_skipped.tolist() == [True, False, False, True]
    assert found.skipped.tolist() == [1, 4]


def test_the_last_line_of_a_step_replaces_all_of_an_earlier_one(tmp_path):
    path = lines(
        tmp_path / "metrics.jsonl",
        '{"step": 1, "loss": 3.0}\n',
        '{"step": 2, "loss": NaN, "skipped/tensor": "a", "old": 1}\n',
        '{"step": 3, "loss": 1.0}\n',
        '{"step": 2, "loss": 2.0}\n',
    )
    found = read_metrics(path)
    assert found["loss"].tolist() == [3.0, 2.0, 1.0]
    assert found.nonfinite == {}
    assert found.texts["skipped/tensor"] == {}
    assert not found.column("old")


def test_steps_before_the_first_line_are_not_counted_as_skips_of_that_line(tmp_path):
    path = lines(
        tmp_path / "metrics.jsonl",
        *(f'{{"step": {step}, "skipped_steps": {skips}}}\n' for step, skips in ((21, 3), (22, 3), (23, 4))),
    )
    assert read_metrics(path).skipped.tolist() == [23]


def test_steps_that_no_run_can_have_are_damaged_lines(tmp_path):
    steps = ("9" * 400, str(2**53), "-1", "61.0", "true", "7")
    found = read_metrics(lines(tmp_path / "metrics.jsonl", *(f'{{"step": {step}}}\n' for step in steps)))
    assert found.steps.tolist() == [7]
    assert found.notes[0] == "metrics.jsonl: 5 damaged lines left out, the first is line 1"


def test_a_file_that_cannot_be_read_is_one_message(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    path = lines(tmp_path / "metrics.jsonl", "{}\n")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read \(Permission denied\): make it"):
        read_metrics(path)


def test_figures_can_be_left_out_by_the_beginning_of_their_names(tmp_path):
    path = lines(tmp_path / "metrics.jsonl", '{"step": 1, "loss": 3.0, "a/x": 1, "a/y": "text", "ba/x": 2}\n')
    found = read_metrics(path, without=("a/", "c/"))
    assert list(found.columns) == ["loss", "ba/x"]
    assert found.texts == {}
