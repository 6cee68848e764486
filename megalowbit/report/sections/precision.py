"""Which part of a run was computed at which precision: formats of a recipe, or the choices of speculation."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalowbit.records.run import BLOCK, RunRecords
from megalowbit.records.tables import Checks
from megalowbit.report.drawing.axis import Axis
from megalowbit.report.drawing.bins import bin_means
from megalowbit.report.drawing.chart import Band, Chart
from megalowbit.report.drawing.document import paragraphs, table
from megalowbit.report.drawing.heat import Heat, colour_bar, value_range
from megalowbit.report.sections.curves import Drawing, grid
from megalowbit.telemetry.layer_names import short_names

SHARE = "speculation/share_"
SUM = "8bit_or_less"  # the sum of others
HIGH = ("bf16", "fp16", "fp32")  # drawn in grey
GREY = (138, 143, 152)
# Okabe and Ito's colours, as the lines of the light page have them
COLOURS = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (184, 96, 154), (181, 122, 0), (58, 148, 201))


def precisions(drawing: Drawing) -> str:
    """Formats of each run, and for runs with speculation the precisions over time."""
    drawn = table(
        [
            "run",
            "recipe",
            "formats: input, weight, output gradient",
            "layers in low bits",
            "weights in them",
            "late switch",
        ],
        [_formats(run) for run in drawing.runs],
    )
    drawn += grid([_shares(drawing, run) for run in drawing.runs])
    for run in drawing.runs:
        if run.checks is not None:
            heading = f"<h3>{escape(run.label)}</h3>" if len(drawing.runs) > 1 else ""
            drawn += heading + _maps(run, run.checks)
    return drawn


def _formats(run: RunRecords) -> list[str]:
    attempt: Mapping[str, Any] = run.attempts[-1] if run.attempts else {}
    formats = attempt.get("formats")
    names = ("low_bit_layers", "kept_layers", "low_bit_weights", "parameters")
    layers, kept, weights, parameters = (_count(attempt.get(name)) for name in names)
    texts = ", ".join(str(each) for each in formats.values()) if isinstance(formats, Mapping) else ""
    converted = share = "–"
    if layers is not None and kept is not None:
        converted = f"{layers:,} of {layers + kept:,}"
    elif run.grids is not None:
        converted = f"{len(run.grids.layers):,}"
    if weights is not None and parameters:
        share = f"{100 * weights / parameters:.1f} % of all"
    return [run.label, run.recipe, texts or "–", converted, share, _switch(run)]


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _switch(run: RunRecords) -> str:
    switched = run.metrics.column("precision_switched")
    at = switched.steps[switched.values > 0]
    scope = run.setting(f"{BLOCK}.late_switch.scope")
    if len(at):
        return f"after step {int(at[0]) - 1:,}: {scope} in high precision"
    return "–" if run.setting(f"{BLOCK}.late_switch") is None else "not reached"


def _shares(drawing: Drawing, run: RunRecords) -> str:
    """Areas of the shares over time, the lowest precision at the bottom."""
    names = candidates(run)
    if not names:
        return ""
    columns = [run.metrics.column(f"{SHARE}{name}").finite() for name in names]
    steps = np.unique(np.concatenate([each.steps for each in columns]))
    values = np.stack([100 * np.interp(steps, each.steps, each.values) for each in columns])
    x, values = bin_means(drawing.x(run, steps), values, drawing.bins)
    tops = np.cumsum(values, axis=0)
    edges = np.repeat(np.append(x, drawing.x(run, run.metrics.steps[-1:])), 2)[
        1:-1
    ]  # held until the next check
    parts = [
        Band(name, edges, np.repeat(low, 2), np.repeat(high, 2), None if name in HIGH else number, "area")
        for number, (name, low, high) in enumerate(zip(names, [np.zeros(len(x)), *tops], tops, strict=False))
    ]
    title = "Precision shares" + (f", {run.label}" if len(drawing.runs) > 1 else "")
    return Chart(
        title=title,
        parts=parts,
        unit="% of the products",
        x=drawing.axis,
        y=Axis(0.0, 100.0),
        x_name=drawing.x_name,
    ).html()


def candidates(run: RunRecords) -> list[str]:
    """The precisions whose shares the run has recorded, in the order of its configuration."""
    columns = run.metrics.columns.items()
    found = [name.removeprefix(SHARE) for name, column in columns if name.startswith(SHARE) and column]
    return [name for name in found if name != SUM]


def _maps(run: RunRecords, checks: Checks) -> str:
    names = short_names(checks.layers)
    rows = [names[layer] for layer in checks.layers]
    order = list(dict.fromkeys([*candidates(run), *checks.candidates]))
    place = np.array([order.index(name) for name in checks.candidates], dtype=float)
    colours = [GREY if name in HIGH else COLOURS[number % len(COLOURS)] for number, name in enumerate(order)]
    high = max(1, len(order) - 1)
    common: dict[str, Any] = {"rows": rows, "columns": checks.columns}
    chosen = "".join(
        Heat(
            title=product,
            cells=_renumbered(cells, place),
            low=0,
            high=high,
            unit=",".join(order),
            colours=colours,
            **common,
        ).html()
        for product, cells in checks.precision.items()
    )
    keys = "".join(
        f'<span><b class="key block" style="--c:rgb{colour}"></b>{escape(name)}</span>'
        for name, colour in zip(order, colours, strict=True)
    )
    drawn = (
        '<h3>Precision of each product by layer <span class="soft">as it ran at the check</span></h3>'
        f'<p class="legend">{keys}</p><div class="trio">{chosen}</div>'
    )
    measured = {product: cells for product, cells in checks.measured.items() if np.isfinite(cells).any()}
    if measured:
        low_db, high_db = value_range(list(measured.values()))
        maps = "".join(
            Heat(title=product, cells=cells, low=low_db, high=high_db, unit="dB", **common).html()
            for product, cells in measured.items()
        )
        drawn += (
            '<h3>Measured SNR of the products <span class="soft">where a check verified it</span></h3>'
            f'{colour_bar(f"{low_db:.3g} dB", f"{high_db:.3g} dB")}<div class="trio">{maps}</div>'
        )
    notes = [f"{checks.misses:,} verified products in all checks were below their threshold."]
    if len(checks.columns) < checks.num_checks:
        notes.insert(0, f"The maps show {len(checks.columns)} of {checks.num_checks:,} precision checks.")
    return drawn + paragraphs([" ".join(notes)], "note")


def _renumbered(cells: NDArray[np.float64], place: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numbers of candidates as numbers in another order."""
    return np.where(np.isnan(cells), np.nan, place[np.nan_to_num(cells).astype(int)])
