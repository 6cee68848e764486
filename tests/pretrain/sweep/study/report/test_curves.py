"""Pictures: places of points and bars."""

import re

import pytest

from megalowbit.pretrain.sweep.study.report.curves import Curve, picture
from megalowbit.report.drawing.chart import SIZE


def test_a_picture_has_points_in_proportion():
    lines = {"a": {100: 0.0, 200: 0.02}, "b": {100: 0.01, 200: 0.01}}
    curves = {label: Curve(line, {}) for label, line in lines.items()}
    svg = picture(curves, noise=None, title="t")
    first, second = (part.partition('"')[0].split() for part in svg.split('points="')[1:])
    (left, bottom), (right, top) = (tuple(map(float, point.split(","))) for point in first)
    assert (left, right) == (SIZE / 2, SIZE)
    assert float(second[0].split(",")[1]) == pytest.approx((top + bottom) / 2, abs=0.1)
    assert picture({}, noise=None, title="t") == ""


def test_sizes_are_places_of_a_logarithmic_axis_and_its_only_ticks():
    intervals = {1.0: (0.0, 0.01, 0.02), 10.0: (0.0, 0.02, 0.03), 100.0: (0.0, 0.03, 0.04)}
    svg = picture(
        {"a": Curve({}, intervals)}, noise=None, title="t", axis="million parameters", is_logarithmic=True
    )
    (dots,) = re.findall(r'class="dot c0" d="([^"]*)"', svg)
    places = [float(each) for each in re.findall(r"M([0-9.]+)", dots)]
    assert places[1] == pytest.approx((places[0] + places[2]) / 2, abs=0.1)
    assert re.findall(r'<i class="x[^>]*>([^<]*)<', svg) == ["1", "10", "100"]
    assert "million parameters</i>" in svg


def test_a_picture_has_a_bar_for_each_interval_and_cuts_those_that_would_hide_the_rest():
    line = {100.0: 0.0, 200.0: 0.02}
    curve = Curve(line, {100.0: (-0.005, 0.0, 0.005), 150.0: (0.01, 0.01, 0.01), 200.0: (-9.0, 0.02, 9.0)})
    svg = picture({"a": curve}, noise=0.002, title="t")
    (path,) = re.findall(r'class="interval c0" d="([^"]*)"', svg)
    bars = [tuple(map(float, each)) for each in re.findall(r"M[0-9.]+ ([0-9.]+)V([0-9.]+)", path)]
    assert len(bars) == 2  # none where the ends are equal
    (dots,) = re.findall(r'class="dot c0" d="([^"]*)"', svg)
    assert dots.count("h0") == 3
    (points,) = re.findall(r'<polyline[^>]* points="([^"]*)"', svg)
    (_, zero), (_, top) = (map(float, each.split(",")) for each in points.split())
    unit = (zero - top) / 0.02
    assert bars[0] == pytest.approx((zero + 0.005 * unit, zero - 0.005 * unit), abs=0.2)
    assert bars[1] == pytest.approx((SIZE, 0.0), abs=0.1)  # cut at the ends of the axes
    assert path.count("h6") == 2  # the cut bar has no caps
    assert svg.count("<polygon") == 1  # the band of the noise
