"""Charts of a step's figures: bins, means, the common axis, one line for each run."""

import numpy as np
from made_runs import write_run

from megalowbit.records.run import read_runs
from megalowbit.report.sections.curves import Drawing, grid


def drawing_of(tmp_path, *steps, tokens=512, **more):
    folders = [
        write_run(tmp_path / str(n), each, tokens=tokens * (n + 1), **more) for n, each in enumerate(steps)
    ]
    return Drawing(read_runs(folders))


def test_a_figure_is_drawn_pale_through_all_steps_and_bold_as_a_mean(tmp_path):
    losses = np.arange(1.0, 301.0)
    drawing = drawing_of(tmp_path, 300, losses=list(losses))
    pale, bold = drawing.smooth("loss", "training")
    assert (pale.kind, pale.label, bold.kind, bold.label) == ("faint", "", "line", "training")
    assert pale.y.tolist() == losses.tolist()
    window = drawing.window
    assert window == 4
    assert bold.y[-1] == np.mean(losses[-window:])


def test_runs_of_few_steps_have_one_line(tmp_path):
    (line,) = drawing_of(tmp_path, 6).smooth("loss", "training")
    assert (line.kind, len(line.y)) == ("line", 6)


def test_the_axis_ends_with_the_longest_run_and_is_tokens_where_steps_differ(tmp_path):
    one = drawing_of(tmp_path / "one", 50)
    assert (one.x_name, one.axis.high) == ("step", 50)
    two = drawing_of(tmp_path / "two", 50, 40)  # of 512 and 1024 tokens
    assert (two.x_name, two.axis.high) == ("tokens", 40 * 1024)
    assert two.x(two.runs[1], np.array([10.0])).tolist() == [10 * 1024]
    assert [line.label for line in two.plain("lr", "rate")] == ["0", "1"]


def test_many_runs_share_the_points_of_a_picture(tmp_path):
    drawing = drawing_of(tmp_path, *[3] * 18)
    assert drawing.bins == 250
    assert drawing.chart("nothing", drawing.plain("no such figure", "x")) == ""


def test_one_narrow_chart_takes_the_whole_width():
    chart, wide = '<figure class="chart">', '<figure class="chart wide">'
    assert grid([wide, chart, ""]).startswith('<div class="grid one">')
    assert grid([wide, chart, chart]).startswith('<div class="grid two">')
    assert grid([chart] * 3).startswith('<div class="grid">')
    assert grid(["", ""]) == ""
