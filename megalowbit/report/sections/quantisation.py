"""Quantisation: rates by operand over time, and maps of layers × steps."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalowbit.records.run import RunRecords
from megalowbit.records.tables import ROLES, Grids
from megalowbit.report.drawing.axis import number_text
from megalowbit.report.drawing.chart import NUM_COLOURS
from megalowbit.report.drawing.document import paragraphs
from megalowbit.report.drawing.heat import Heat, colour_bar, value_range
from megalowbit.report.sections.curves import Drawing, grid
from megalowbit.telemetry.layer_names import short_names

ROLE_NAMES = {"input": "input", "weight": "weight", "grad_output": "output gradient"}


class Measure(NamedTuple):
    """A rate: its name in tables by layer and in the metrics, title, unit, factor of the metrics, meaning."""

    name: str
    column: str
    title: str
    unit: str
    factor: float
    short: str
    meaning: str


MEASURES = (
    Measure(
        "saturation",
        "saturation_rate",
        "Saturation",
        "%",
        100.0,
        "% beyond the format",
        "the overflow of a format: elements beyond its largest number, which they become",
    ),
    Measure(
        "underflow",
        "underflow_rate",
        "Underflow",
        "%",
        100.0,
        "% that became zero",
        "elements that were not zero and became zero",
    ),
    Measure(
        "snr",
        "snr_db",
        "Signal-to-noise ratio",
        "dB",
        1.0,
        "dB, low is noisy",
        "10·log₁₀(Σx² ÷ Σerror²); low is noisy",
    ),
)


def rates(drawing: Drawing) -> str:
    """Rates by operand over time."""
    is_one = len(drawing.runs) == 1
    charts = []
    for measure in MEASURES:
        parts = []
        for style, run in enumerate(drawing.runs):
            for number, role in enumerate(ROLES):
                column = run.metrics.column(f"quantization/{role}/{measure.column}")
                label = ROLE_NAMES[role] if is_one else f"{run.label}, {ROLE_NAMES[role]}"
                kind = number if is_one else style % NUM_COLOURS + NUM_COLOURS * number
                parts += drawing.line(run, column, label, kind, measure.factor)
        charts.append(drawing.chart(measure.title, parts, measure.short))
    drawn = grid(charts)
    return drawn and drawn + paragraphs(["Counted in step 1 and every telemetry.count_every steps."], "note")


def maps(drawing: Drawing) -> str:
    """Maps of layers × steps for each run that has tables by layer."""
    found = ""
    for run in drawing.runs:
        if run.grids is None:
            continue
        heading = f"<h3>{escape(run.label)}</h3>" if len(drawing.runs) > 1 else ""
        found += heading + _maps_of(run, run.grids)
    return found


def _maps_of(run: RunRecords, grids: Grids) -> str:
    names = short_names(grids.layers)
    drawn = "".join(_row(measure, grids, [names[layer] for layer in grids.layers]) for measure in MEASURES)
    notes = ["A column shows everything that was counted since the column before."]
    if len(grids.columns) == 1:
        notes.append(
            "There is one table, so the maps have one column: lower megalowbit.telemetry.layers_every "
            f"(now {run.setting('megalowbit.telemetry.layers_every', '?')}) to see changes over time."
        )
    return drawn + paragraphs(notes, "note")


def _row(measure: Measure, grids: Grids, rows: list[str]) -> str:
    """A measure for each role, with common colours."""
    cells: Mapping[str, NDArray[np.float64]] = grids.cells[measure.name]
    shown = {role: each for role, each in cells.items() if np.isfinite(each).any()}
    if not shown:
        return ""
    low, high = value_range(list(shown.values()))
    texts = [f"{number_text(float(f'{end:.3g}'))} {measure.unit}" for end in (low, high)]
    drawn = "".join(
        Heat(
            title=ROLE_NAMES[role],
            cells=each,
            rows=rows,
            columns=grids.columns,
            low=low,
            high=high,
            unit=measure.unit,
        ).html()
        for role, each in shown.items()
    )
    return (
        f'<h3>{measure.title} by layer and step <span class="soft">{measure.meaning}</span></h3>'
        f'{colour_bar(*texts)}<div class="trio">{drawn}</div>'
    )
