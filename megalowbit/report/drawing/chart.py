"""Charts: an SVG that stretches to any width, with its texts beside it in HTML.

The SVG has 1000 × 1000 units for the area between the axes and no preserved aspect, so it fills a phone and a
desktop alike, and lines keep their width. Texts are HTML, placed by percentages, and therefore never
stretched. All colours are variables of `style.css`. A chart needs no script; `live.js` reads values back
from the points of the lines when the pointer is over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megalowbit.report.drawing.axis import Axis, axis_of

Numbers = NDArray[np.float64]
SIZE = 1000  # units of the area, in both directions
NUM_COLOURS = 6  # classes c0 … c5 of the style; more lines get dashes as well
NUM_DASHES = 3
CAP = 3.0  # half of the width of an interval's ends, in units
WIDE_CHART = '<figure class="chart wide'
NUM_STYLES = NUM_COLOURS * NUM_DASHES


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        label: its name, for the legend and for reading values; empty: it is only seen.
        x: (points,), ascending.
        y: (points,); a gap where it is not finite.
        style: number of its colour and dash.
        kind: `line`, or `faint`: thin and pale, behind the others.
    """

    label: str
    x: ArrayLike
    y: ArrayLike
    style: int = 0
    kind: Literal["line", "faint"] = "line"


@dataclass(frozen=True)
class Band:
    """An area between two curves over x; `style` None: grey; `kind` `area`: not seen through."""

    label: str
    x: ArrayLike
    low: ArrayLike
    high: ArrayLike
    style: int | None = None
    kind: Literal["band", "area"] = "band"


@dataclass(frozen=True)
class Marks:
    """Events on the horizontal axis: a tick at the lower end of the area for each."""

    label: str
    x: ArrayLike
    style: int = 1


@dataclass(frozen=True)
class Dots:
    """Points, and for those with an interval a bar with caps at ends that are inside the area.

    Attributes:
        x, y: (points,).
        low, high: ends of the intervals; equal ends: none is drawn.
        shift: moves them to the right, in units, so that those of several lines do not hide each other.
    """

    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None
    style: int = 0
    shift: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart; `html()` draws it.

    Attributes:
        title: above it.
        unit: behind the title, in grey.
        x, y: the axes; None: they follow from the parts.
        x_name: below the horizontal axis.
        x_ticks: values with a text; None: round numbers.
        base: of a logarithmic vertical axis that follows from the parts; see `axis_of`.
        note: below the legend.
        is_wide: whether it takes the whole width of a grid of charts.
    """

    title: str
    parts: Sequence[Line | Band | Marks | Dots]
    unit: str = ""
    x: Axis | None = None
    y: Axis | None = None
    x_name: str = "step"
    x_ticks: Sequence[tuple[float, str]] | None = None
    base: int | None = 0
    note: str = ""
    is_wide: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)

    def axes(self) -> tuple[Axis, Axis]:
        """The axes."""
        with_height = [part for part in self.parts if not isinstance(part, Marks)]
        x = self.x
        if x is None:
            ends = [values for part in self.parts for values in _lowest_and_highest(part.x)]
            x = Axis(min(ends, default=0.0), max(ends, default=1.0))
        y = self.y or axis_of(
            np.concatenate([_heights(part) for part in with_height] or [np.zeros(0)]), base=self.base
        )
        return x, y

    def html(self) -> str:
        """The chart as a `<figure>`."""
        x, y = self.axes()
        drawn = "".join(_drawn(part, x, y) for part in _in_order(self.parts))
        grid = "".join(
            f'<path class="{"zero" if value == 0 else "rule"}" d="M0 {_from_top(y, value):.1f}H{SIZE}"/>'
            for value, _ in y.ticks()
        )
        y_texts = "".join(
            f'<i class="y" style="bottom:{100 * float(y.place(value)):.2f}%">{escape(text)}</i>'
            for value, text in y.ticks()
        )
        x_ticks = x.ticks() if self.x_ticks is None else self.x_ticks
        x_texts = below_axis([(float(x.place(value)), text) for value, text in x_ticks])
        unit = f' <span class="soft">{escape(self.unit)}</span>' if self.unit else ""
        data = {"x": _range(x), "y": _range(y), "name": self.x_name, **self.extra}
        attributes = " ".join(f'data-{name}="{escape(value)}"' for name, value in data.items())
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        kind = " wide" if self.is_wide else ""
        if sum(isinstance(part, Line) and part.kind == "faint" for part in self.parts) > 1:
            kind += " many"
        return (
            f'<figure class="chart{kind}"><figcaption>{escape(self.title)}{unit}'
            f'</figcaption><div class="plot" {attributes}><svg viewBox="0 0 {SIZE} {SIZE}" '
            f'preserveAspectRatio="none" role="img" aria-label="{escape(self.title)}">{grid}{drawn}</svg>'
            f'{y_texts}{x_texts}<i class="name">{escape(self.x_name)}</i></div>'
            f"{_legend(self.parts)}{note}</figure>"
        )


def below_axis(ticks: Sequence[tuple[float, str]]) -> str:
    """Texts below a horizontal axis at shares of its width; a phone leaves out every second one."""
    return "".join(
        f'<i class="x{" between" if (len(ticks) - number) % 2 == 0 else ""}" style="left:{100 * place:.2f}%">'
        f"{escape(text)}</i>"
        for number, (place, text) in enumerate(ticks)
    )


def style_class(style: int | None) -> str:
    """The classes of a style: its colour, and its dash if there are more lines than colours."""
    if style is None:
        return "grey"
    dash = style // NUM_COLOURS % NUM_DASHES
    return f"c{style % NUM_COLOURS}" + (f" d{dash}" if dash else "")


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """A line of keys: classes of the key and text of each."""
    line = '<svg class="key" viewBox="0 0 28 8"><path class="{}" d="M0 4H28"/></svg>'
    spans = [f"<span>{line.format(kind)}{escape(label)}</span>" for kind, label in entries]
    return f'<p class="legend">{" ".join(spans)}</p>' if spans else ""


def _legend(parts: Sequence[Line | Band | Marks | Dots]) -> str:
    entries: dict[str, str] = {}
    for part in parts:
        if isinstance(part, Dots) or not part.label:
            continue
        kind = {Line: "line", Band: "swatch", Marks: "line"}[type(part)]
        if isinstance(part, Line) and part.kind == "faint":
            kind = "faint"
        if isinstance(part, Band) and part.kind == "area":
            kind = "swatch area"
        entries.setdefault(part.label, f"{kind} {style_class(part.style)}")
    shown = entries if len(entries) > 1 or any(isinstance(part, (Band, Marks)) for part in parts) else {}
    return legend([(kind, label) for label, kind in shown.items()])


def _in_order(parts: Sequence[Line | Band | Marks | Dots]) -> list[Line | Band | Marks | Dots]:
    """Bands behind faint lines behind lines behind the rest."""
    rank = {Band: 0, Line: 2, Marks: 3, Dots: 4}
    return sorted(parts, key=lambda each: 1 if getattr(each, "kind", "") == "faint" else rank[type(each)])


def _drawn(part: Line | Band | Marks | Dots, x: Axis, y: Axis) -> str:
    kind = style_class(part.style)
    if isinstance(part, Line):
        name = f' data-n="{escape(part.label)}"' if part.label else ""
        runs = _between_gaps(np.asarray(part.x, dtype=float), np.asarray(part.y, dtype=float), y)
        return "".join(
            f'<polyline class="{part.kind} {kind}"{name} points="{_points(x, y, *each)}"/>' for each in runs
        )
    if isinstance(part, Band):
        xs, low, high = (np.asarray(each, dtype=float) for each in (part.x, part.low, part.high))
        if not len(xs):
            return ""
        there, back = _points(x, y, xs, high), _points(x, y, xs[::-1], low[::-1])
        return f'<polygon class="{part.kind} {kind}" points="{there} {back}"/>'
    if isinstance(part, Marks):
        path = "".join(f"M{each:.1f} {SIZE}V{SIZE - 60}" for each in SIZE * x.place(part.x))
        return f'<path class="mark {kind}" d="{path}"/>' if path else ""
    return _drawn_dots(part, x, y, kind)


def _drawn_dots(part: Dots, x: Axis, y: Axis, kind: str) -> str:
    across = SIZE * x.place(part.x) + part.shift
    heights = np.asarray(part.y, dtype=float)
    bars = ""
    if part.low is not None and part.high is not None:
        for place, low, high in zip(across, np.asarray(part.low), np.asarray(part.high), strict=True):
            if low < high:
                ends = _from_top(y, max(low, y.low)), _from_top(y, min(high, y.high))
                bars += f"M{place:.1f} {ends[0]:.1f}V{ends[1]:.1f}"
                caps = [_from_top(y, end) for end in (low, high) if y.low <= end <= y.high]
                bars += "".join(f"M{place - CAP:.1f} {each:.1f}h{2 * CAP:g}" for each in caps)
    drawn = f'<path class="interval {kind}" d="{bars}"/>' if bars else ""
    # a line of no length with round ends is a dot that is not stretched
    dots = "".join(
        f"M{place:.1f} {_from_top(y, height):.1f}h0" for place, height in zip(across, heights, strict=True)
    )
    return drawn + (f'<path class="dot {kind}" d="{dots}"/>' if dots else "")


def _between_gaps(x: Numbers, y: Numbers, axis: Axis) -> list[tuple[Numbers, Numbers]]:
    """The parts of a curve between gaps; values that a logarithmic axis cannot show are gaps."""
    is_shown = np.isfinite(y) & ((y > 0) if axis.base else True)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_shown.astype(np.int8), [0]])))
    return [(x[start:end], y[start:end]) for start, end in edges.reshape(-1, 2)]


def _points(x: Axis, y: Axis, xs: Numbers, ys: Numbers) -> str:
    across, down = np.round(SIZE * x.place(xs), 1), np.round(SIZE * (1 - y.place(ys)), 1)
    return " ".join(f"{a:g},{b:g}" for a, b in zip(across.tolist(), down.tolist(), strict=True))


def _from_top(y: Axis, value: float) -> float:
    return SIZE * (1 - float(y.place(value)))


def _range(axis: Axis) -> str:
    return f"{axis.low!r} {axis.high!r}" + (" log" if axis.base else "")


def _lowest_and_highest(x: ArrayLike) -> list[float]:
    numbers = np.asarray(x, dtype=float)
    return [float(numbers.min()), float(numbers.max())] if numbers.size else []


def _heights(part: Line | Band | Dots) -> Numbers:
    """The values that the vertical axis must show; intervals of dots may be cut."""
    if isinstance(part, Band):
        return np.concatenate([np.asarray(part.low, dtype=float), np.asarray(part.high, dtype=float)])
    return np.asarray(part.y, dtype=float)
