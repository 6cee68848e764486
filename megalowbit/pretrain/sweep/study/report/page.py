"""The results of a study as one HTML page, without scripts and without other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from megalowbit.pretrain.sweep.study.report.analysis import Group, Row
from megalowbit.pretrain.sweep.study.report.costs import RecipeCost
from megalowbit.pretrain.sweep.study.report.curves import Curve, picture
from megalowbit.pretrain.sweep.study.report.sizes import SizeTrends
from megalowbit.pretrain.sweep.study.report.statistics import Estimate
from megalowbit.pretrain.sweep.study.report.tables import (
    COST_HEADINGS,
    COST_NOTE,
    TREND_HEADINGS,
    cells,
    cost_tables,
    headings,
    notes,
    trend_note,
    trend_rows,
)
from megalowbit.pretrain.sweep.study.results import VERSIONS, Origin
from megalowbit.report.drawing.document import document, paragraphs, part, table


def page(
    title: str,
    groups: Sequence[Group],
    trends: Sequence[SizeTrends],
    costs: Sequence[RecipeCost],
    data: dict[str, Any],
) -> str:
    """The page.

    Args:
        title: of the study.
        groups: what was compared.
        trends: power laws over sizes.
        costs: of the linear layers.
        data: the content of study.json, for origin and texts.
    """
    heading = f"Gaps to {groups[0].study.baseline}: {title}" if groups else f"{title}: no pair is finished"
    body = "".join(map(_section, groups)) + "".join(map(_trends, trends))
    body += "".join(f"<p>{escape(each)}</p>" for each in data["missing"])
    body += "".join(
        part(name, table(COST_HEADINGS, rows) + paragraphs([COST_NOTE]))
        for name, rows in cost_tables(costs, data["study"]["baseline"]).items()
    )
    return document(heading, f"<h1>{escape(heading)}</h1>{_introduction(data)}{body}{_origin(data)}")


def _introduction(data: dict[str, Any]) -> str:
    unfinished = f" {data['unfinished']} cells are not finished." if data["unfinished"] else ""
    return (
        "<p>Loss of each recipe minus that of the baseline, in nats per token, within pairs of equal size, "
        "text, length and seed. Intervals are 95 % (Student’s t over pairs). “Steps behind”: so "
        "long the mean curve of the baseline took from the loss at which the recipe ends to its own. “Held "
        "out, bf16” is the gap of the trained weights, evaluated in bf16 on text that no run has read; "
        "“forward noise” is what the same weights lose in their own precision. CPU time is that of a "
        "training step, relative to the baseline: the median of pairs of one kind of processor, or of "
        "one name where no instructions are recorded. Bars in the pictures are intervals. Replicas repeat a "
        f"recipe with a change that should not matter; they show the noise floor (grey band).{unfinished}</p>"
    )


def _section(group: Group) -> str:
    curves = {row.label: _curve(row) for row in group.rows}
    drawn = picture(curves, noise=group.noise_floor(), title="Gap to the baseline")
    rows = [cells(group, row) for row in (*group.rows, *group.noise)]
    kinds = ["" for _ in group.rows] + ["replica" for _ in group.noise]
    said = paragraphs(notes(group))
    return part(group.title, drawn + table(headings(group), rows, kinds) + said)


def _trends(trends: SizeTrends) -> str:
    curves = {}
    for label, law in trends.laws.items():
        first, last = min(law.estimates), max(law.estimates)
        sizes = [first * (last / first) ** (number / 20) for number in range(21)]
        line = {} if law.exponent is None else {size / 1e6: law.at(size) for size in sizes}
        intervals = {size / 1e6: _interval(each) for size, each in law.estimates.items()}
        curves[label] = Curve(line, intervals)
    drawn = picture(curves, noise=None, title="Gap by size", axis="million parameters", is_logarithmic=True)
    rows = table(TREND_HEADINGS, trend_rows(trends))
    return part(trends.title, drawn + rows + paragraphs([trend_note(trends)]))


def _curve(row: Row) -> Curve:
    line = {float(step): gap for step, gap in row.curve.items()}
    return Curve(line, {float(step): _interval(gap) for step, gap in row.gaps.items()})


def _interval(value: Estimate) -> tuple[float, float, float]:
    low, high = (value.mean if each is None else each for each in (value.low, value.high))
    return low, value.mean, high


def _origin(data: dict[str, Any]) -> str:
    made = data["report_made_with"]
    texts = "".join(
        f"<li>{escape(name)}: {escape(facts['description'])}, {facts['train_bytes']:,} bytes and "
        f"{facts['heldout_bytes']:,} held out in {facts['heldout_documents']} parts, of whose phrases "
        f"{facts['heldout_repeated']:.1%} are in the training text, "
        f"SHA-256 <code>{facts['train_sha256'][:16]}…</code></li>"
        for name, facts in data["texts"].items()
    )
    return (
        f"<h2>Origin</h2><ul>{texts}<li>command: <code>{escape(' '.join(made['command']))}</code></li>"
        f"{_machines(data)}</ul>"
    )


def _machines(data: dict[str, Any]) -> str:
    """A line for each combination of commit, versions and processor, with the number of cells."""
    counts: dict[str, int] = {}
    for cell in data["cells"].values():
        made = data["origins"][cell["origin"]]
        versions = ", ".join(f"{name} {made[name]}" for name in ("python", *VERSIONS) if made[name])
        place = Origin.model_validate(made).place()
        line = f"commit <code>{escape(str(made['commit']))}</code>, {escape(f'{versions}, {place}')}"
        counts[line] = counts.get(line, 0) + 1
    return "".join(f"<li>{count} cells: {line}</li>" for line, count in counts.items())
