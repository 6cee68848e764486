"""Curves of the gap to the baseline against steps or sizes, with intervals, as inline SVG.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; dashes distinguish further recipes.
Text and axes take the colour of the page, so one picture serves light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

# without yellow and black, which are faint on a light or a dark page
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("", "7 3", "2 3")
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 92, 44, 14, 62  # margins around the axes; a phone's text is twice as large
TICKS = 5
DODGE = 4.0  # horizontal distance between the bars of two recipes
WIDEST = 1.0  # intervals may extend the vertical range by this part of that of the curves, at either end


@dataclass(frozen=True)
class Curve:
    """A line and intervals.

    Attributes:
        line: abscissa → gap in nats.
        intervals: abscissa → low end, mean and high end; equal ends: no interval is known.
    """

    line: Mapping[float, float]
    intervals: Mapping[float, tuple[float, float, float]]


@dataclass(frozen=True)
class Axes:
    """Where values are drawn: `x` and `y` give places, the others the ends of the axes."""

    x: Callable[[float], float]
    y: Callable[[float], float]
    first: float
    last: float
    low: float
    high: float


def picture(
    curves: Mapping[str, Curve],
    *,
    noise: float | None,
    title: str,
    axis: str = "step",
    is_logarithmic: bool = False,
) -> str:
    """An SVG with one line for each recipe, bars for its intervals, and a legend below it.

    Args:
        curves: label → its line and intervals.
        noise: half the height of a band around 0; None: no band.
        title: for readers that do not see it.
        axis: name of the horizontal axis.
        is_logarithmic: whether that axis is.
    """
    if not any(curve.line or curve.intervals for curve in curves.values()):
        return ""
    axes = _axes(curves, noise or 0.0, is_logarithmic)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    if noise is not None:
        band = f'x="{LEFT}" y="{axes.y(noise):.1f}" width="{WIDTH - LEFT - RIGHT}"'
        parts.append(f'<rect class="noise" {band} height="{axes.y(-noise) - axes.y(noise):.1f}"/>')
    for tick in ticks(axes.low, axes.high):
        kind = "zero" if tick == 0 else "grid"
        parts.append(f'<path class="{kind}" d="M{LEFT} {axes.y(tick):.1f}H{WIDTH - RIGHT}"/>')
        place = f'x="{LEFT - 6}" y="{axes.y(tick) + 4:.1f}"'
        parts.append(f'<text {place} text-anchor="end">{tick:.6g}</text>')
    if is_logarithmic:
        places = sorted({each for curve in curves.values() for each in curve.intervals})
    else:
        places = ticks(axes.first, axes.last)
    for tick in places:
        place = f'x="{axes.x(tick):.1f}" y="{HEIGHT - BOTTOM + 24}"'
        parts.append(
            f'<text {place} text-anchor="middle">{tick:.3g}</text>'
            if is_logarithmic
            else f'<text {place} text-anchor="middle">{tick:g}</text>'
        )
    middle = f'x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}"'
    parts.append(f'<text {middle} text-anchor="middle">{escape(axis)}</text>')
    for number, (label, curve) in enumerate(curves.items()):
        points = " ".join(f"{axes.x(step):.1f},{axes.y(gap):.1f}" for step, gap in sorted(curve.line.items()))
        if points:
            named = f"<title>{escape(label)}</title>"
            parts.append(f'<polyline points="{points}" {_stroke(number)}>{named}</polyline>')
        shift = (number - (len(curves) - 1) / 2) * DODGE
        parts.append(_bars(curve, axes, shift, COLOURS[number % len(COLOURS)]))
    return "".join([*parts, "</svg>", legend(list(curves))])


def _axes(curves: Mapping[str, Curve], noise: float, is_logarithmic: bool) -> Axes:
    """Axes that show all means, and intervals as far as they do not hide the rest."""
    steps = [each for curve in curves.values() for each in (*curve.line, *curve.intervals)]
    means = [gap for curve in curves.values() for gap in curve.line.values()]
    intervals = [each for curve in curves.values() for each in curve.intervals.values()]
    means += [mean for _, mean, _ in intervals]
    ends = [end for low, _, high in intervals for end in (low, high)]
    low, high = min(0.0, -noise, *means), max(0.0, noise, *means)
    room = WIDEST * (high - low)
    low, high = max(low - room, min([low, *ends])), min(high + room, max([high, *ends]))
    first, last = (min(steps), max(steps)) if is_logarithmic else (min(0.0, *steps), max(steps))
    scale = math.log if is_logarithmic else float

    def x(step: float) -> float:
        part = (scale(step) - scale(first)) / ((scale(last) - scale(first)) or 1)
        inner = 30 if is_logarithmic else 0  # room for the bars of the smallest and the largest size
        return LEFT + inner + (WIDTH - LEFT - RIGHT - 2 * inner) * part

    def y(gap: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (gap - low) / ((high - low) or 1)

    return Axes(x, y, first, last, low, high)


def _bars(curve: Curve, axes: Axes, shift: float, colour: str) -> str:
    """Bars of the intervals, with caps at ends that are inside the axes, and a dot at each mean."""
    path, dots = "", ""
    for place, (low, mean, high) in sorted(curve.intervals.items()):
        x = min(axes.x(place) + shift, WIDTH - 4)
        if low < high:
            bottom, top = axes.y(max(low, axes.low)), axes.y(min(high, axes.high))
            path += f"M{x:.1f} {bottom:.1f}V{top:.1f}"
            caps = [axes.y(end) for end in (low, high) if axes.low <= end <= axes.high]
            path += "".join(f"M{x - 2.5:.1f} {each:.1f}h5" for each in caps)
        dots += f'<circle cx="{x:.1f}" cy="{axes.y(mean):.1f}" r="2.6" fill="{colour}"/>'
    return (f'<path class="interval" stroke="{colour}" d="{path}"/>' if path else "") + dots


def legend(labels: Sequence[str]) -> str:
    """The line and name of each recipe."""
    line = '<svg class="key" viewBox="0 0 28 8"><path d="M0 4H28" {}/></svg>'
    entries = [
        f"<span>{line.format(_stroke(number))}{escape(label)}</span>" for number, label in enumerate(labels)
    ]
    return f'<p class="legend">{" ".join(entries)}</p>'


def ticks(low: float, high: float) -> list[float]:
    """Round numbers within a range, 0 included if it is inside."""
    if high <= low:
        return [low]
    raw = (high - low) / TICKS
    unit = 10 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw * (1 - 1e-9))
    return [
        number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def _stroke(number: int) -> str:
    colour = COLOURS[number % len(COLOURS)]
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    return f'class="line" stroke="{colour}"' + (f' stroke-dasharray="{dash}"' if dash else "")
