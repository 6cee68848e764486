"""Which part of a run was computed at which precision: formats of a recipe, or the choices of speculation."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from megalowbit.report.drawing.axis import Axis
from megalowbit.report.drawing.chart import Band, Chart
from megalowbit.report.drawing.document import paragraphs, table
from megalowbit.report.drawing.heat import Heat, colour_bar, value_range
from megalowbit.report.records.run import BLOCK, RunRecords
from megalowbit.report.records.tables import Checks
from megalowbit.report.sections.curves import Drawing, grid
from megalowbit.telemetry.layer_names import short_names

SHARE = "speculation/share_"
SUM = "8bit_or_less"  # the sum of others
# Okabe and Ito's colours, as the lines of the light page have them
COLOURS = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (184, 96, 154), (181, 122, 0), (58, 148, 201))


def precisions(drawing: Drawing) -> str:
    """Formats of each run, and for runs with speculation the precisions over time."""
    drawn = table(
        ["run", "recipe", "formats: input, weight, output gradient", "layers in low bits", "weights in them", "late switch"],
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
    formats, layers = attempt.get("formats"), attempt.get("low_bit_layers")
    weights, all_weights = attempt.get("low_bit_weights"), attempt.get("parameters")
    texts = ", ".join(str(each) for each in formats.values()) if isinstance(formats, Mapping) else "–"
    converted = "–"
    if _is_count(layers):
        converted = f"{layers:,} of {layers + (attempt.get('kept_layers') or 0):,}"
    elif run.grids is not None:
        converted = f"{len(run.grids.layers):,}"
    share = f"{100 * weights / all_weights:.1f} % of all" if _is_count(weights) and _is_count(all_weights) and all_weights else "–"
    return [run.label, run.recipe, texts, converted, share, _switch(run)]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _switch(run: RunRecords) -> str:
    switched = run.metrics.column("precision_switched")
    at = switched.steps[switched.values > 0]
    scope = run.setting(f"{BLOCK}.late_switch.scope")
    if len(at):
        return f"after step {int(at[0]) - 1:,}: {scope} in high precision"
    return "–" if run.setting(f"{BLOCK}.late_switch") is None else "not reached"


def _shares(drawing: Drawing, run: RunRecords) -> str:
    """Areas of the shares over time, the lowest precision at the bottom."""
    names = [name for name in run.metrics.columns if name.startswith(SHARE) and not name.endswith(SUM)]
    if not names:
        return ""
    columns = [run.metrics.column(name) for name in names]
    steps = columns[0].steps
    values = np.stack([100 * np.nan_to_num(np.interp(steps, each.steps, each.values)) for each in columns])
    tops = np.cumsum(values, axis=0)
    x = drawing.x(run, steps)
    # a choice holds until the next check
    edges = np.repeat(x, 2)[1:]
    parts = [
        Band(name.removeprefix(SHARE), edges, np.repeat(low, 2)[:-1], np.repeat(high, 2)[:-1], number, "area")
        for number, (name, low, high) in enumerate(zip(names, [np.zeros(len(steps)), *tops], tops, strict=False))
    ]
    title = "Precision shares" + (f", {run.label}" if len(drawing.runs) > 1 else "")
    return Chart(
        title=title, parts=parts, unit="% of the products", x=drawing.axis, y=Axis(0.0, 100.0), x_name=drawing.x_name
    ).html()


def _maps(run: RunRecords, checks: Checks) -> str:
    names = short_names(checks.layers)
    rows = [names[layer] for layer in checks.layers]
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(checks.candidates))]
    high = max(1, len(checks.candidates) - 1)
    common: dict[str, Any] = {"rows": rows, "columns": checks.columns}
    chosen = "".join(
        Heat(
            title=product, cells=cells, low=0, high=high, unit=",".join(checks.candidates), colours=colours, **common
        ).html()
        for product, cells in checks.precision.items()
    )
    keys = "".join(
        f'<span><svg class="key" viewBox="0 0 28 8"><path style="stroke:rgb{colour};stroke-width:8" d="M0 4H28"/></svg>'
        f"{escape(name)}</span>"
        for name, colour in zip(checks.candidates, colours, strict=True)
    )
    drawn = (
        '<h3>Precision of each product by layer and step <span class="soft">as it ran at the check</span></h3>'
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
    return drawn + paragraphs([checks.note], "note")
