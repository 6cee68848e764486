"""Curves of the gap to the baseline against steps or sizes, with intervals; drawn as in a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalowbit.report.drawing.axis import Axis
from megalowbit.report.drawing.chart import Band, Chart, Dots, Line

DODGE = 5.0  # horizontal distance between the bars of two recipes, in thousandths of the width
WIDEST = 1.0  # intervals may extend the vertical range by this part of that of the curves, at either end
INNER = 0.045  # of a logarithmic axis, left free beside the bars of the smallest and the largest size


@dataclass(frozen=True)
class Curve:
    """A line and intervals.

    Attributes:
        line: abscissa → gap in nats.
        intervals: abscissa → low end, mean and high end; equal ends: no interval is known.
    """

    line: Mapping[float, float]
    intervals: Mapping[float, tuple[float, float, float]]


def picture(
    curves: Mapping[str, Curve],
    *,
    noise: float | None,
    title: str,
    axis: str = "step",
    is_logarithmic: bool = False,
) -> str:
    """A chart with one line for each recipe, bars for its intervals, and a legend below it.

    Args:
        curves: label → its line and intervals.
        noise: half the height of a band around 0; None: no band.
        title: above it.
        axis: name of the horizontal axis.
        is_logarithmic: whether that axis is.
    """
    if not any(curve.line or curve.intervals for curve in curves.values()):
        return ""
    x = _horizontal(curves, is_logarithmic)
    parts: list[Line | Band | Dots] = []
    if noise is not None:
        parts.append(Band("noise floor", [x.low, x.high], [-noise] * 2, [noise] * 2))
    for number, (label, curve) in enumerate(curves.items()):
        steps = sorted(curve.line)
        if steps:
            parts.append(Line(label, steps, [curve.line[step] for step in steps], number))
        places = sorted(curve.intervals)
        if places:
            low, mean, high = zip(*(curve.intervals[place] for place in places), strict=True)
            shift = (number - (len(curves) - 1) / 2) * DODGE
            parts.append(Dots(places, mean, low, high, number, shift))
    sizes = sorted({each for curve in curves.values() for each in curve.intervals})
    return Chart(
        title=title,
        unit="nats",
        parts=parts,
        x=x,
        y=_vertical(curves, noise or 0.0),
        x_name=axis,
        x_ticks=[(size, f"{size:.3g}") for size in sizes] if is_logarithmic else None,
        is_wide=True,
    ).html()


def _horizontal(curves: Mapping[str, Curve], is_logarithmic: bool) -> Axis:
    steps = [each for curve in curves.values() for each in (*curve.line, *curve.intervals)]
    if not is_logarithmic:
        return Axis(min(0.0, *steps), max(steps))
    first, last = min(steps), max(steps)
    room = (last / first) ** INNER
    return Axis(first / room, last * room, 10)


def _vertical(curves: Mapping[str, Curve], noise: float) -> Axis:
    """An axis that shows all means, and intervals as far as they do not hide the rest."""
    means = [gap for curve in curves.values() for gap in curve.line.values()]
    intervals = [each for curve in curves.values() for each in curve.intervals.values()]
    means += [mean for _, mean, _ in intervals]
    ends = [end for low, _, high in intervals for end in (low, high)]
    low, high = min(0.0, -noise, *means), max(0.0, noise, *means)
    room = WIDEST * (high - low)
    return Axis(max(low - room, min([low, *ends])), min(high + room, max([high, *ends])))
