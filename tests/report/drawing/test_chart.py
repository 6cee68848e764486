"""Charts: places of values, gaps, styles; nothing in a name becomes markup."""

import re

import numpy as np

from megalowbit.report.drawing.axis import Axis
from megalowbit.report.drawing.chart import Band, Chart, Dots, Line, Marks, style_class
from megalowbit.report.drawing.document import document, table


def points(html):
    return [
        [tuple(map(float, point.split(","))) for point in each.split()]
        for each in re.findall(r'<polyline[^>]* points="([^"]*)"', html)
    ]


def test_lines_are_drawn_in_proportion_and_broken_at_values_that_are_not_finite():
    line = Line("a", [0, 1, 2, 3, 4], [0.0, 1.0, np.nan, 4.0, 2.0])
    html = Chart(title="t", parts=[line], x=Axis(0, 4), y=Axis(0, 4)).html()
    assert points(html) == [[(0, 1000), (250, 750)], [(750, 0), (1000, 500)]]
    log = Chart(
        title="t", parts=[Line("a", [0, 1, 2], [0.0, 1.0, 100.0])], x=Axis(0, 2), y=Axis(1, 100, 10)
    ).html()
    assert points(log) == [[(500, 1000), (1000, 0)]]


def test_names_of_lines_and_titles_are_escaped():
    parts = [Line('<b>"&', [0, 1], [0, 1]), Marks("<i>", [0.5])]
    html = Chart(title="<u>", parts=parts, unit="<s>", x_name="<q>", note="<p>").html()
    for each in ("<b>", "<i>x", "<u>", "<s>", "<q>", "<p>x"):
        assert each not in html
    assert "&lt;b&gt;&quot;&amp;" in html
    assert "<td>&lt;b&gt;</td>" in table(["x"], [["<b>"]])
    assert "<title>&lt;b&gt;</title>" in document("<b>", "")


def test_bands_marks_and_dots_have_their_places():
    parts = [Band("band", [0, 4], [1, 1], [3, 3], 1), Marks("skips", [2], 2), Dots([1], [2], [1], [9])]
    html = Chart(title="t", parts=parts, x=Axis(0, 4), y=Axis(0, 4)).html()
    assert '<polygon class="band c1" points="0,250 1000,250 1000,750 0,750"/>' in html
    assert '<path class="mark c2" d="M500.0 1000V940"/>' in html
    assert '<path class="interval c0" d="M250.0 750.0V0.0M247.0 750.0h6"/>' in html  # cut above, no cap there
    assert html.count("<span>") == 2


def test_styles_differ_for_eighteen_lines():
    assert len({style_class(number) for number in range(18)}) == 18
