"""Charts of the figures of a step, one line for each run, over steps or tokens.

A figure that scatters from step to step is drawn twice: pale through the lowest and highest value of each
bin, so that no spike is lost, and bold as the mean of the last steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megalowbit.records.metrics import Column
from megalowbit.records.run import RunRecords
from megalowbit.report.drawing.axis import Axis
from megalowbit.report.drawing.bins import BINS, extremes, places, running_mean, thinned
from megalowbit.report.drawing.chart import WIDE_CHART, Band, Chart, Dots, Line, Marks

Numbers = NDArray[np.float64]
WINDOWS = 100  # a mean is over this part of the steps of the longest run
LEAST_WINDOW = 4
MOST_POINTS = 9000  # of all runs in a picture; more runs get fewer bins


@dataclass(frozen=True)
class Drawing:
    """What all charts of a page share.

    Attributes:
        runs: the first one is the reference; a run's number is the style of its lines.
    """

    runs: Sequence[RunRecords]

    @cached_property
    def bins(self) -> int:
        """Bins of a line."""
        return max(150, min(BINS, MOST_POINTS // (2 * len(self.runs))))

    @cached_property
    def is_over_tokens(self) -> bool:
        """Whether the horizontal axis is tokens, because steps of the runs have different numbers of them."""
        sizes = [run.tokens_per_step for run in self.runs]
        known = [size for size in sizes if size]
        return len(known) == len(sizes) and max(known) > min(known) * (1 + 1e-6)

    @property
    def x_name(self) -> str:
        """Name of the horizontal axis."""
        return "tokens" if self.is_over_tokens else "step"

    def x(self, run: RunRecords, steps: Numbers) -> Numbers:
        """Places on the horizontal axis of some steps of a run."""
        if not self.is_over_tokens:
            return steps
        tokens = run.metrics.column("tokens").finite()
        return np.interp(steps, tokens.steps, tokens.values)

    @cached_property
    def axis(self) -> Axis:
        """The horizontal axis of all charts: from 0 to the end of the longest run."""
        ends = [float(self.x(run, run.metrics.steps[-1:])[0]) for run in self.runs]
        return Axis(0.0, max(ends) or 1.0)

    @cached_property
    def window(self) -> int:
        """Steps of a running mean."""
        return max(LEAST_WINDOW, max(run.metrics.last_step for run in self.runs) // WINDOWS)

    def name(self, run: RunRecords, what: str) -> str:
        """What a line is called: the run, if there are several."""
        return run.label if len(self.runs) > 1 else what

    def smooth(self, column: str, what: str, factor: float = 1.0) -> list[Line]:
        """Pale and bold lines of a figure that scatters, for each run that has it."""
        found = []
        for style, run in enumerate(self.runs):
            known = run.metrics.column(column).finite()
            if not len(known.steps):
                continue
            x, y = self.x(run, known.steps), factor * known.values
            label = self.name(run, what)
            is_smoothed = len(y) > 2 * self.window
            found.append(
                Line(
                    "" if is_smoothed else label,
                    *extremes(x, y, self.bins),
                    style,
                    "faint" if is_smoothed else "line",
                )
            )
            if is_smoothed:
                found.append(Line(label, *thinned(x, running_mean(y, self.window), self.bins), style))
        return found

    def plain(self, column: str, what: str, factor: float = 1.0, *, dash: int = 0) -> list[Line]:
        """A line of a figure for each run that has it; `dash` adds to the style."""
        found = []
        for style, run in enumerate(self.runs):
            known = run.metrics.column(column)
            found += self.line(run, known, self.name(run, what), style + dash, factor)
        return found

    def line(
        self, run: RunRecords, column: Column, label: str, style: int, factor: float = 1.0
    ) -> list[Line]:
        """A line of a figure; none if it has no finite value."""
        known = column.finite()
        if not len(known.steps):
            return []
        points = extremes(self.x(run, known.steps), factor * known.values, self.bins)
        return [Line(label, *points, style)]

    def marks(self, run: RunRecords, steps: Numbers, label: str, style: int) -> Marks:
        """Ticks at steps of a run, at most one a bin."""
        return Marks(label, self.x(run, places(steps, self.bins)), style)

    def chart(
        self,
        title: str,
        parts: Sequence[Line | Band | Marks | Dots],
        unit: str = "",
        *,
        base: int | None = 0,
        note: str = "",
        is_wide: bool = False,
        y: Axis | None = None,
    ) -> str:
        """A chart over the common axis; nothing if no run has the figure."""
        if not any(isinstance(part, (Line, Band, Dots)) and np.size(part.x) for part in parts):
            return ""
        return Chart(
            title=title,
            parts=parts,
            unit=unit,
            x=self.axis,
            y=y,
            x_name=self.x_name,
            base=base,
            note=note,
            is_wide=is_wide,
        ).html()


def grid(charts: Sequence[str]) -> str:
    """Charts side by side where there is room; empty ones are left out."""
    shown = [chart for chart in charts if chart]
    narrow = sum(not chart.startswith(WIDE_CHART) for chart in shown)
    kind = {1: " one", 2: " two", 4: " two"}.get(narrow, "")
    return f'<div class="grid{kind}">{"".join(shown)}</div>' if shown else ""


def is_constant(column: Column) -> bool:
    """Whether all finite values are equal."""
    values = column.finite().values
    return bool(len(values)) and bool((values == values[0]).all())
