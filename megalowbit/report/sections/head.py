"""The head of the page: names, state, key figures, and what a reader should know first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from megalowbit.records.files import METRICS
from megalowbit.records.run import BLOCK, RunRecords, duration_text
from megalowbit.report.drawing.axis import number_text
from megalowbit.report.drawing.chart import legend, style_class
from megalowbit.report.drawing.document import table
from megalowbit.report.sections.curves import Drawing
from megalowbit.telemetry.columns import SATURATION_RATE
from megalowbit.values import counted

LAST_STEPS = 50  # the loss of the end is a mean over at most so many steps


def head(drawing: Drawing) -> str:
    """Title, state and key figures of the runs."""
    runs = drawing.runs
    if len(runs) == 1:
        run = runs[0]
        tiles = "".join(
            f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>"
            for name, value in key_figures(run)
            if value
        )
        title, below = run.label, f'<div class="tiles">{tiles}</div>'
        about = f"{run.recipe}, {run.setting(f'{BLOCK}.precision', '?')} · {run.state}"
    else:
        title = f"{runs[0].label} and {counted(len(runs) - 1, 'other run')}"
        about = f"Compared with the first run, {runs[0].label}."
        below = _comparison(runs)
    return f'<h1>{escape(title)}</h1><p class="soft">{escape(about)}</p>{below}{_warnings(runs)}'


def _comparison(runs: Sequence[RunRecords]) -> str:
    figures = [dict(key_figures(run)) for run in runs]
    names = [name for name in figures[0] if any(each.get(name) for each in figures)]
    names += [name for each in figures for name in each if each[name] and name not in names]
    rows = [
        [run.label, run.recipe, *(each.get(name) or "–" for name in dict.fromkeys(names))]
        for run, each in zip(runs, figures, strict=True)
    ]
    keys = legend(
        [(f"line {style_class(number)}", f"{run.label}: {run.state}") for number, run in enumerate(runs)]
    )
    return keys + table(["run", "recipe", *dict.fromkeys(names)], rows)


def key_figures(run: RunRecords) -> list[tuple[str, str]]:
    """Name and text of each figure; empty where it is not known."""
    metrics = run.metrics
    seconds = _seconds(run)
    of = f" of {run.steps:,}" if run.steps and run.finished is None else ""
    return [
        (_loss_name(run), _text(_end_loss(run), ".4f")),
        ("validation loss", _text(metrics.column("validation/loss").last, ".4f")),
        ("bits per byte", _text(metrics.column("validation/bits_per_byte").last, ".4f")),
        ("steps", f"{metrics.last_step:,}{of}"),
        ("skipped steps", f"{len(metrics.skipped):,}"),
        ("tokens", _amount(metrics.column("tokens").last)),
        ("time in steps", "" if seconds is None else duration_text(seconds)),
        ("tokens/s, median", _amount(_median(run, "tokens_per_second"))),
        ("MFU, median", _percent(_median(run, "mfu"))),
        ("saturated gradients", _percent(metrics.column(SATURATION_RATE).last)),
    ]


def _loss_name(run: RunRecords) -> str:
    return f"loss, last {counted(_num_last(run), 'step')}"


def _num_last(run: RunRecords) -> int:
    return max(1, min(LAST_STEPS, len(run.metrics.column("loss").finite().values) // 10))


def _end_loss(run: RunRecords) -> float | None:
    values = run.metrics.column("loss").finite().values
    return float(values[-_num_last(run) :].mean()) if len(values) else None


def _seconds(run: RunRecords) -> float | None:
    """Time in steps: tokens of each step over its speed."""
    speed, size = run.metrics.column("tokens_per_second").finite(), run.tokens_per_step
    if not len(speed.values) or size is None or (speed.values <= 0).any():
        return None
    return float((size / speed.values).sum())


def _median(run: RunRecords, name: str) -> float | None:
    values = run.metrics.column(name).finite().values
    return float(np.median(values)) if len(values) else None


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _amount(value: float | None) -> str:
    return "" if value is None else number_text(float(f"{value:.4g}"))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.3g} %"


def _warnings(runs: Sequence[RunRecords]) -> str:
    lines = [f"{run.label}: {line}" if len(runs) > 1 else line for run in runs for line in warnings(run)]
    return (
        f'<ul class="warnings">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>' if lines else ""
    )


def warnings(run: RunRecords) -> list[str]:
    """What a reader of a run should know first."""
    metrics = run.metrics
    found = [f"{note}." for note in run.notes]
    if run.finished is not None and run.finished > metrics.last_step:
        found.append(f"{METRICS} ends with step {metrics.last_step:,}, so later steps are not shown.")
    strange = metrics.nonfinite.get("loss")
    if strange is not None:
        found.append(
            f"The loss was not finite in {counted(len(strange), 'step')}, first in step {int(strange[0]):,}."
        )
    skipped = metrics.skipped
    if len(skipped):
        share = 100 * len(skipped) / len(metrics.steps)
        found.append(
            f"Skipped because gradients overflowed: {counted(len(skipped), 'step')} ({share:.2g} %), "
            f"the last one step {int(skipped[-1]):,}."
        )
    rollbacks = metrics.column("rollbacks").last
    if rollbacks:
        found.append(
            f"The run was rolled back {counted(int(rollbacks), 'time')}; repeated steps show their last "
            "attempt."
        )
    if run.grids is not None and run.grids.nonfinite:
        (layer, role), count = max(run.grids.nonfinite.items(), key=lambda each: each[1])
        found.append(
            f"Operands had elements that were inf or NaN, most of them {role} of {layer} ({count:,})."
        )
    return found
