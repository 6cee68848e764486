"""Pictures: places of points, bars and ticks."""

import re

import pytest

from megalowbit.pretrain.sweep.study.report.curves import HEIGHT, Curve, picture, ticks


def test_a_picture_has_round_ticks_and_points_in_proportion():
    assert ticks(0, 1500) == [0, 500, 1000, 1500]
    assert ticks(-0.004, 0.031) == pytest.approx([0, 0.01, 0.02, 0.03])
    assert ticks(2, 2) == [2]
    lines = {"a": {100: 0.0, 200: 0.02}, "b": {100: 0.01, 200: 0.01}}
    curves = {label: Curve(line, {}) for label, line in lines.items()}
    svg = picture(curves, noise=None, title="t")
    first, second = (part.partition('"')[0].split() for part in svg.split('points="')[1:])
    (left, bottom), (right, top) = (tuple(map(float, point.split(","))) for point in first)
    assert right > left > 100
    assert float(second[0].split(",")[1]) == pytest.approx((top + bottom) / 2, abs=0.1)
    assert picture({}, noise=None, title="t") == ""


def test_a_picture_has_a_bar_for_each_interval_and_cuts_those_that_would_hide_the_rest():
    line = {100.0: 0.0, 200.0: 0.02}
    curve = Curve(line, {100.0: (-0.005, 0.0, 0.005), 150.0: (0.01, 0.01, 0.01), 200.0: (-9.0, 0.02, 9.0)})
    svg = picture({"a": curve}, noise=0.002, title="t")
    (path,) = re.findall(r'class="interval" stroke="#0072B2" d="([^"]*)"', svg)
    bars = [tuple(map(float, each)) for each in re.findall(r"M[0-9.]+ ([0-9.]+)V([0-9.]+)", path)]
    assert len(bars) == 2  # none where the ends are equal
    assert svg.count("<circle") == 3
    points = [tuple(map(float, point.split(","))) for point in re.findall(r"[0-9.]+,[0-9.]+", svg)]
    (_, zero), (_, top) = points
    unit = (zero - top) / 0.02
    assert bars[0] == pytest.approx((zero + 0.005 * unit, zero - 0.005 * unit), abs=0.2)
    assert bars[1][0] - bars[1][1] < HEIGHT  # cut at the ends of the axes
    assert path.count("h5") == 2  # the cut bar has no caps
