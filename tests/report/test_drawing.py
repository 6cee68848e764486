"""Axes, charts and heat maps: places of values, gaps, colours that can be read back."""

import base64
import json
import re
import struct
import zlib

import numpy as np
import pytest

from megalowbit.report.drawing.axis import Axis, axis_of, number_text, ticks
from megalowbit.report.drawing.chart import Band, Chart, Dots, Line, Marks, style_class
from megalowbit.report.drawing.document import document, table
from megalowbit.report.drawing.heat import EMPTY, Heat, palette_colours, value_range


def points(html):
    return [
        [tuple(map(float, point.split(","))) for point in each.split()]
        for each in re.findall(r'<polyline[^>]* points="([^"]*)"', html)
    ]


def decoded(png):
    """Indices of a PNG with a palette, as the specification defines the file."""
    at, chunks = 8, {}
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        name, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + data)
        chunks[name] = data
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:], chunks


def test_ticks_are_round_numbers_within_the_range():
    assert ticks(0, 1500) == [0, 500, 1000, 1500]
    assert ticks(-0.004, 0.031) == pytest.approx([0, 0.01, 0.02, 0.03])
    assert ticks(2, 2) == [2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.003, "0.003"), (1500, "1,500"), (40_000, "40k"), (2.5e6, "2.5M"), (-0.5, "−0.5"), (3e-5, "3e-05")],
)
def test_numbers_are_short(value, text):
    assert number_text(value) == text


def test_an_axis_shows_all_values_and_turns_logarithmic_only_for_values_far_above_the_others():
    plain = axis_of([2.0, 3.0, 5.0], base=None)
    assert plain.base == 0
    assert plain.low < 2.0 < 5.0 < plain.high
    wide = axis_of([1.0] * 9 + [1e4], base=None)
    assert wide.base == 10
    assert wide.place([wide.low, 100.0, wide.high]) == pytest.approx([0, 0.5, 1], abs=0.01)
    assert axis_of([0.0, 1.0, 1e4], base=None).base == 0  # 0 has no logarithm
    assert axis_of([np.nan, np.inf]) == Axis(0.0, 1.0)
    assert axis_of([0.0, 1.0]).low == 0.0


@pytest.mark.parametrize("base", [0, 2, 10])
def test_ticks_of_an_axis_are_inside(base):
    for low, high in ((1.0, 2.0), (1.0, 65536.0), (3e-6, 4e-3), (17.0, 17.5)):
        axis = Axis(low, high, base)
        found = axis.ticks()
        assert found
        assert all(low <= value <= high for value, _ in found)
        assert len({text for _, text in found}) == len(found)


def test_lines_are_drawn_in_proportion_and_broken_at_values_that_are_not_finite():
    line = Line("a", [0, 1, 2, 3, 4], [0.0, 1.0, np.nan, 4.0, 2.0])
    html = Chart(title="t", parts=[line], x=Axis(0, 4), y=Axis(0, 4)).html()
    assert points(html) == [[(0, 1000), (250, 750)], [(750, 0), (1000, 500)]]
    log = Chart(title="t", parts=[Line("a", [0, 1, 2], [0.0, 1.0, 100.0])], x=Axis(0, 2), y=Axis(1, 100, 10)).html()
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


def test_a_heat_map_has_the_values_in_its_pixels():
    cells = np.array([[0.0, 5.0, 10.0], [np.nan, 10.0, 2.5]])
    heat = Heat(title="t", cells=cells, rows=["a<b", "c"], columns=[10, 20, 30], low=0.0, high=10.0, unit="%")
    html = heat.html()
    (data,) = re.findall(r"data:image/png;base64,([^\"]*)", html)
    indices, chunks = decoded(base64.b64decode(data))
    assert indices.shape == (2, 30)  # a pixel for each step
    assert indices[:, [0, 9, 10, 19, 20, 29]].tolist() == [
        [0, 0, 127, 127, 254, 254],
        [EMPTY, EMPTY, 254, 254, 64, 64],
    ]
    assert chunks[b"tRNS"][EMPTY] == 0
    assert set(chunks[b"tRNS"][:EMPTY]) == {255}
    palette = palette_colours()
    assert len(set(palette)) == len(palette) == EMPTY
    assert chunks[b"PLTE"][:3] == bytes(palette[0])
    assert "a<b" not in html


def test_columns_are_as_wide_as_their_steps():
    heat = Heat(title="t", cells=np.array([[1.0, 0.0]]), rows=["a"], columns=[10, 100], low=0.0, high=1.0)
    (data,) = re.findall(r"data:image/png;base64,([^\"]*)", heat.html())
    indices, _ = decoded(base64.b64decode(data))
    assert (indices[0] == 254).sum() == 10
    assert json.loads(re.findall(r'data-columns="([^"]*)"', heat.html())[0]) == [10, 100]


def test_a_range_of_equal_values_is_one_value():
    assert value_range([np.array([[3.0, np.nan]])]) == (3.0, 3.0)
    assert value_range([np.array([[20.0, 20.0 + 1e-12]])]) == (20.0, 20.0)
    assert value_range([np.array([[1.0]]), np.array([[4.0]])]) == (1.0, 4.0)
    assert value_range([np.array([[np.nan]])]) == (0.0, 1.0)
