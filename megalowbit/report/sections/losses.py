"""Losses: of training, of validation, by source, and the gaps to the reference."""

from __future__ import annotations

import numpy as np

from megalowbit.records.run import BLOCK, RunRecords
from megalowbit.report.compare import (
    ERRORS,
    Gap,
    cautions,
    gap_between,
    is_repeat,
    noise_floor,
    why_not_comparable,
)
from megalowbit.report.drawing.chart import NUM_COLOURS, Band, Dots, Line, Marks
from megalowbit.report.drawing.document import paragraphs, table
from megalowbit.report.sections.curves import Drawing, grid
from megalowbit.values import counted

SOURCE = "loss/"


def losses(drawing: Drawing) -> str:
    """Training and validation loss."""
    parts: list[Line | Marks | Dots] = list(drawing.smooth("loss", "training, mean"))
    for style, run in enumerate(drawing.runs):
        strange = run.metrics.nonfinite.get("loss", np.zeros(0))
        if len(strange):
            label = f"{drawing.name(run, 'loss')} not finite ({counted(len(strange), 'step')})"
            parts.append(drawing.marks(run, strange, label, style))
    is_one = len(drawing.runs) == 1
    if is_one:
        parts += _validation(drawing, "validation/loss", "validation", 1)
    window = f" Bold: mean of the last {drawing.window:,} steps."
    note = (
        f"Pale: lowest and highest step of each of {drawing.bins:,} bins, so that no spike is lost.{window}"
    )
    longest = max(run.metrics.last_step for run in drawing.runs)
    note = note if longest > 2 * drawing.bins else f"Pale: every step.{window}"
    charts = [drawing.chart("Training loss", parts, "nats", base=None, note=note, is_wide=True)]
    if not is_one or drawing.runs[0].metrics.column("validation/bf16_loss"):
        charts.append(_validation_chart(drawing))
    charts.append(_sources(drawing))
    return grid(charts)


def _validation(drawing: Drawing, column: str, label: str, style: int) -> list[Line | Dots]:
    run = drawing.runs[0]
    known = run.metrics.column(column).finite()
    if not len(known.steps):
        return []
    x = drawing.x(run, known.steps)
    return [Line(label, x, known.values, style), Dots(x, known.values, style=style)]


def _validation_chart(drawing: Drawing) -> str:
    parts: list[Line | Dots] = []
    is_one = len(drawing.runs) == 1
    for style, run in enumerate(drawing.runs):
        own, plain = (run.metrics.column(f"validation/{name}").finite() for name in ("loss", "bf16_loss"))
        if len(own.steps):
            x = drawing.x(run, own.steps)
            parts += [
                Line("as the run rounds" if is_one else run.label, x, own.values, style),
                Dots(x, own.values, style=style),
            ]
        if len(plain.steps):
            label = "nothing quantised" if is_one else f"{run.label}, nothing quantised"
            other = 1 if is_one else style + NUM_COLOURS
            parts.append(Line(label, drawing.x(run, plain.steps), plain.values, other))
    texts = {
        str(run.setting(f"{BLOCK}.data.validation"))
        for run in drawing.runs
        if run.metrics.column("validation/loss")
    }
    note = "The runs validate on different texts: their losses cannot be compared." if len(texts) > 1 else ""
    return drawing.chart("Validation loss", parts, "nats", note=note)


def _sources(drawing: Drawing) -> str:
    parts = []
    for style, run in enumerate(drawing.runs):
        names = [name for name in run.metrics.columns if name.startswith(SOURCE)]
        for number, name in enumerate(names):
            known = run.metrics.column(name).finite()
            source = name.removeprefix(SOURCE)
            label = source if len(drawing.runs) == 1 else f"{run.label}, {source}"
            kind = number if len(drawing.runs) == 1 else style + NUM_COLOURS * (number % 3)
            parts += drawing.line(run, known, label, kind)
    return drawing.chart("Loss by source", parts, "nats")


def gaps(drawing: Drawing) -> str:
    """The gap of each run to the first one, with its noise, or why there is none."""
    reference, *others = drawing.runs
    if not others:
        return ""
    lines, found = [], dict[str, Gap]()
    for run in others:
        why = why_not_comparable(run, reference)
        gap = None if why else gap_between(run, reference)
        if why:
            lines.append(f"{run.label} and {reference.label} have no gap: {why}.")
        elif gap is None:
            lines.append(f"{run.label} and {reference.label} have too few common steps for a gap.")
        else:
            found[run.label] = gap
            lines += [f"{run.label}: {each}" for each in cautions(run, reference)]
            if gap.num_left_out:
                left_out = counted(gap.num_left_out, "common step")
                lines.append(f"{run.label}: left out, because a loss is not finite: {left_out}.")
    if not found:
        return paragraphs(lines)
    repeats = [run.label for run in others if run.label in found and is_repeat(run, reference)]
    floor = noise_floor([found[label] for label in repeats])
    charts = grid([_gap_chart(drawing, found, floor), _validation_gap(drawing)])
    said = [_meaning(reference, found), _floor_text(repeats, floor), *lines]
    return f"{charts}{_gap_table(drawing, found)}{paragraphs([each for each in said if each], 'note')}"


def _gap_chart(drawing: Drawing, found: dict[str, Gap], floor: float | None) -> str:
    parts: list[Line | Band] = []
    if floor is not None:
        parts.append(Band("noise floor: repeats", [0.0, drawing.axis.high], [-floor] * 2, [floor] * 2, None))
    for style, run in enumerate(drawing.runs):
        gap = found.get(run.label)
        if gap is None:
            continue
        x = drawing.x(run, gap.steps)
        low, high = gap.means - ERRORS * gap.errors, gap.means + ERRORS * gap.errors
        parts += [
            Band("", x, low, high, style),
            Line(f"{run.label} − {drawing.runs[0].label}", x, gap.means, style),
        ]
    return drawing.chart(
        "Gap of the training loss", parts, f"nats, to {drawing.runs[0].label}; above 0: worse", is_wide=True
    )


def _validation_gap(drawing: Drawing) -> str:
    reference, *others = drawing.runs
    peer = reference.metrics.column("validation/loss").finite()
    parts: list[Line | Dots] = []
    for style, run in enumerate(others, start=1):
        own = run.metrics.column("validation/loss").finite()
        keys = ("data.validation", "validation.tokens", "data.tokenizer", "data.sequence_length")
        is_same = all(run.setting(f"{BLOCK}.{key}") == reference.setting(f"{BLOCK}.{key}") for key in keys)
        steps, at, there = np.intersect1d(own.steps, peer.steps, return_indices=True)
        if not is_same or not len(steps) or why_not_comparable(run, reference):
            continue
        x, y = drawing.x(run, steps), own.values[at] - peer.values[there]
        parts += [Line(f"{run.label} − {reference.label}", x, y, style), Dots(x, y, style=style)]
    note = "On equal tokens, so without noise of batches; another seed would change it."
    return drawing.chart("Gap of the validation loss", parts, "nats", note=note)


def _gap_table(drawing: Drawing, found: dict[str, Gap]) -> str:
    head = ["run", "gap at the end", "± 2 standard errors", "%", "over the last"]
    rows = [
        [
            f"{label} − {drawing.runs[0].label}",
            f"{gap.end:+.4f}",
            f"{ERRORS * gap.end_error:.4f}" + (" ≈ 0" if abs(gap.end) <= ERRORS * gap.end_error else ""),
            f"{gap.percent:+.2f}",
            f"{gap.num_end:,} steps",
        ]
        for label, gap in found.items()
    ]
    return table(head, rows)


def _meaning(reference: RunRecords, found: dict[str, Gap]) -> str:
    blocks = sorted({gap.block for gap in found.values()})
    correlations = ", ".join(f"{gap.correlation:.2f}" for gap in found.values())
    return (
        f"A point is the mean over {' or '.join(f'{each:,}' for each in blocks)} steps of the loss minus "
        f"that of {reference.label} at the same step. The coloured band is ± 2 standard errors of this mean: "
        "the standard deviation of the differences of single steps in the block ÷ √steps, × "
        f"√((1 + ρ) / (1 − ρ)) for the correlation ρ of neighbouring differences ({correlations}). It is the "
        "noise of single batches. It does not contain what another seed would change."
    )


def _floor_text(repeats: list[str], floor: float | None) -> str:
    if floor is None:
        return (
            "How far another seed would move the gap is not known here: train the reference again with "
            "another megalowbit.run.seed and name that run as well, or use megalowbit study."
        )
    return (
        f"Noise floor: {floor:.4f} nats, the grey band: the mean gap over the last half of the steps of runs "
        f"that differ from the reference in their seeds only ({', '.join(repeats)}). Of several, it is the "
        "root mean square; one is a single draw."
    )
