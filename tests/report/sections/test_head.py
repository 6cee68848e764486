"""The head: key figures and warnings."""

from html import escape

import numpy as np
import pytest
from made_runs import write_layers, write_run

from megalowbit.records.run import read_runs
from megalowbit.report.page import page
from megalowbit.report.sections.curves import Drawing
from megalowbit.report.sections.head import head, key_figures, warnings


def test_key_figures_are_those_of_the_records(tmp_path):
    losses = list(np.linspace(5, 3, 100))
    (run,) = read_runs([write_run(tmp_path / "run", 100, losses=losses, is_done=False)])
    figures = dict(key_figures(run))
    assert figures["loss, last 10 steps"] == f"{np.mean(losses[-10:]):.4f}"
    assert figures["steps"] == "100 of 100"
    assert figures["tokens"] == "51.2k"
    assert figures["MFU, median"] == "40 %"
    assert figures["validation loss"] == ""
    speeds = run.metrics.column("tokens_per_second").values
    assert figures["time in steps"] == f"{(512 / speeds).sum():.0f} s"


def test_a_comparison_has_a_row_for_each_run_and_only_known_figures(tmp_path):
    def validated(step, record):
        return record | {"validation/loss": 2.0}

    folders = [write_run(tmp_path / "a", 20), write_run(tmp_path / "b", 20, rows=validated)]
    html = head(Drawing(read_runs(folders)))
    assert html.count("<tr>") == 3
    assert "<th>validation loss</th>" in html
    assert "bits per byte" not in html
    assert "<td>–</td>" in html


def test_warnings_name_what_a_reader_should_know_first(tmp_path):
    def rows(step, record):
        return record | {"rollbacks": 1 if step > 8 else None}

    folder = write_run(tmp_path / "run", 20, rows=rows)
    write_layers(folder, steps=20, every=10, layers=1)
    table = folder / "overflow_layers.jsonl"
    table.write_text(table.read_text().replace('"nonfinite": 0', '"nonfinite": 6'))
    (run,) = read_runs([folder])
    assert warnings(run) == [
        "The run was rolled back 1 time; repeated steps show their last attempt.",
        "Operands had elements that were inf or NaN, most of them input of transformer.h.0.mlp.a (6).",
    ]


@pytest.mark.parametrize(
    ("name", "text", "warning"),
    [
        ("attempts.jsonl", "?\n" * 50, "attempts.jsonl: 50 damaged lines left out, the first is line 1."),
        (
            "attempts-rank1.jsonl",
            "?\n",
            "attempts-rank1.jsonl: 1 damaged line left out, the first is line 1.",
        ),
        ("speculation.jsonl", '{"step": 1, "is_hit": false, ?\n' * 50, "speculation.jsonl: 50 damaged lines"),
        (
            "overflow_layers.jsonl",
            '{"step": 1, ?\n' * 50,
            "overflow_layers.jsonl: 50 damaged lines left out.",
        ),
        ("metrics.jsonl", None, "metrics.jsonl: 1 damaged line left out, the first is line 21."),
        ("summary.json", "{garbage", "summary.json is not JSON"),
        ("DONE", "{garbage", "DONE is not JSON"),
        ("DONE", '{"step": 30}', "metrics.jsonl ends with step 20, so later steps are not shown."),
    ],
)
def test_the_head_says_of_each_file_what_is_damaged(tmp_path, name, text, warning):
    folder = write_run(tmp_path / "run", 20)
    assert warnings(read_runs([folder])[0]) == []
    if text is None:
        text = (folder / name).read_text() + "?\n"
    (folder / name).write_text(text)
    (run,) = read_runs([folder])
    (line,) = warnings(run)
    assert warning in line
    page_text = page([run])
    assert escape(line) in page_text[: page_text.index("<nav>")]
    assert "products in all checks were below" not in page_text
    assert "did not record it" not in page_text


@pytest.mark.parametrize("count", [1, 3])
def test_skipped_steps_are_counted(tmp_path, count):
    def rows(step, record):
        return record | {"skipped_steps": min(step, count)}

    (run,) = read_runs([write_run(tmp_path / "run", 20, rows=rows)])
    plural = "" if count == 1 else "s"
    share = 100 * count / 20
    assert warnings(run) == [
        f"Skipped because gradients overflowed: {count} step{plural} ({share:.2g} %), "
        f"the last one step {count}."
    ]
