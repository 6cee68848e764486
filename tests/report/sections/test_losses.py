"""Losses and gaps: what is drawn, and the sentences about noise."""

import re

import numpy as np
from made_runs import write_run

from megalowbit.records.run import read_runs
from megalowbit.report.sections.curves import Drawing
from megalowbit.report.sections.losses import gaps, losses


def validating(shift):
    def rows(step, record):
        return record | ({"validation/loss": 2.5 + shift + 1 / step} if step % 20 == 0 else {})

    return rows


def drawing_of(tmp_path, *runs):
    return Drawing(read_runs([write_run(tmp_path / str(n), 100, **each) for n, each in enumerate(runs)]))


def polylines(html):
    return re.findall(r'<polyline class="(\w+) [^"]*"(?: data-n="([^"]*)")?', html)


def test_one_run_has_its_validation_beside_its_training(tmp_path):
    html = losses(drawing_of(tmp_path, {"rows": validating(0.0)}))
    assert polylines(html) == [("faint", ""), ("line", "training, mean"), ("line", "validation")]
    assert html.count("<figure") == 1


def test_several_runs_have_their_own_validation_chart_and_gaps_of_it(tmp_path):
    drawing = drawing_of(tmp_path, {"rows": validating(0.0)}, {"rows": validating(0.25), "seed": 1})
    html = losses(drawing)
    assert html.count("<figure") == 2
    assert ("line", "1") in polylines(html)
    html = gaps(drawing)
    start = html.index("Gap of the validation loss")
    low, high = map(float, re.findall(r'data-y="([^ ]*) ([^"]*)"', html[start:])[0])
    (points,) = re.findall(r'points="([^"]*)"', html[start:])
    heights = [float(each.split(",")[1]) for each in points.split()]
    assert np.allclose([low + (high - low) * (1 - each / 1000) for each in heights], 0.25, atol=1e-3)


def test_validation_on_other_text_has_no_gap(tmp_path):
    other = {"megalowbit.data.validation.corpus": "other"}
    runs = [{"rows": validating(0.0)}, {"rows": validating(0.2), "changes": other}]
    drawing = drawing_of(tmp_path, *runs)
    assert "different texts" in losses(drawing)
    assert "Gap of the validation loss" not in gaps(drawing)


def test_a_gap_within_its_noise_is_marked_and_one_run_has_none(tmp_path):
    drawing = drawing_of(tmp_path, {}, {"seed": 1}, {"losses": list(np.linspace(9, 8, 100))})
    html = gaps(drawing)
    rows = re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td>", html)
    assert [row[0] for row in rows] == ["1 − 0", "2 − 0"]
    assert [row[2].endswith("≈ 0") for row in rows] == [True, False]
    assert "How far another seed would move the gap is not known here" in html
    assert "noise of single batches" in html
    assert gaps(drawing_of(tmp_path / "alone", {})) == ""


def test_losses_that_are_not_finite_are_marked(tmp_path):
    values = [2.0] * 50 + [float("nan")] * 3 + [2.0] * 47
    html = losses(drawing_of(tmp_path, {"losses": values}))
    assert "loss not finite (3 steps)" in html
    (path,) = re.findall(r'<path class="mark [^"]*" d="([^"]*)"', html)
    assert path.count("M") == 3
