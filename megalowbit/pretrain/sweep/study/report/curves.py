"""Curves of the gap to the baseline against steps, as inline SVG.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; dashes distinguish further recipes.
Text and axes take the colour of the page, so one picture serves light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

# without yellow and black, which are faint on a light or a dark page
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("", "7 3", "2 3")
WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40  # margins around the axes
TICKS = 5

Curve = Mapping[int, float]


def picture(curves: Mapping[str, Curve], *, noise: float | None, title: str) -> str:
    """An SVG with one line for each recipe, and a legend below it.

    Args:
        curves: label → step → gap in nats.
        noise: half the height of a band around 0; None: no band.
        title: for readers that do not see it.
    """
    steps = [step for curve in curves.values() for step in curve]
    gaps = [gap for curve in curves.values() for gap in curve.values()]
    if not gaps:
        return ""
    low, high = min(0.0, -(noise or 0.0), *gaps), max(0.0, noise or 0.0, *gaps)
    first, last = min(0, *steps), max(steps)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / ((last - first) or 1)

    def y(gap: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (gap - low) / ((high - low) or 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    if noise is not None:
        band = f'x="{LEFT}" y="{y(noise):.1f}" width="{WIDTH - LEFT - RIGHT}"'
        parts.append(f'<rect class="noise" {band} height="{y(-noise) - y(noise):.1f}"/>')
    for tick in ticks(low, high):
        kind = "zero" if tick == 0 else "grid"
        parts.append(f'<path class="{kind}" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for tick in ticks(first, last):
        parts.append(
            f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        )
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    for number, (label, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(step):.1f},{y(gap):.1f}" for step, gap in sorted(curve.items()))
        parts.append(
            f'<polyline points="{points}" {_stroke(number)}><title>{escape(label)}</title></polyline>'
        )
    return "".join([*parts, "</svg>", legend(list(curves))])


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
