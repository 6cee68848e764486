"""metrics.jsonl: torn and damaged lines, values that are not finite, steps twice or not at all."""

import pytest

from megalowbit.errors import UserError
from megalowbit.report.records.metrics import read_metrics


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
        tmp_path / "metrics.jsonl",
        *(f'{{"step": {step}, "loss": {n}}}\n' for n, step in enumerate([3, 4, 4, 9])),
    )
    found = read_metrics(path)
    assert found.column("loss").values.tolist() == [0, 2, 3]
    assert found.notes == (
        "1 step occurred twice; the last line of each counts.",
        "6 steps up to step 9 have no line.",
    )


@pytest.mark.parametrize("text", ["", '{"loss": 1.0}\n', "no json\n", '{"step": 1'])
def test_a_file_without_a_step_is_one_message(tmp_path, text):
    with pytest.raises(
        UserError, match=r"metrics.jsonl (is empty|has no complete line with a step): wait for"
    ):
        read_metrics(lines(tmp_path / "metrics.jsonl", text))
