"""The results of a study as one HTML page, without scripts and without other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from megalowbit.pretrain.sweep.study.report.analysis import Group, Row
from megalowbit.pretrain.sweep.study.report.curves import Curve, picture
from megalowbit.pretrain.sweep.study.report.sizes import SizeTrends
from megalowbit.pretrain.sweep.study.report.statistics import Estimate
from megalowbit.pretrain.sweep.study.report.tables import (
    TREND_HEADINGS,
    cells,
    headings,
    notes,
    trend_note,
    trend_rows,
)
from megalowbit.pretrain.sweep.study.results import VERSIONS

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1a1a1a; --soft: #666; --rule: #ddd; --band: #8882; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181b; --text: #e6e6e6; --soft: #a0a0a0; --rule: #3a3d42; --band: #aaa3; }
}
body { background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; font-size: .86rem;
  white-space: nowrap; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .6rem; text-align: right; }
th:first-child, td:first-child { background: var(--page); left: 0; position: sticky; text-align: left; }
tr.replica td, .soft { color: var(--soft); }
svg { display: block; max-width: 48rem; width: 100%; }
svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--rule); } .zero { stroke: var(--text); } .noise { fill: var(--band); }
.line { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; }
.interval { fill: none; stroke-width: 1.2; vector-effect: non-scaling-stroke; }
.legend span { display: inline-block; margin-right: 1rem; font-size: .86rem; }
svg.key { display: inline-block; height: 8px; margin-right: .35rem; width: 28px; }
code { font-size: .85rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) {  /* the picture is drawn at half its size, its text is not */
  svg text { font-size: 22px; } body { margin: 1rem auto; }
  td:first-child { min-width: 7rem; overflow-wrap: break-word; white-space: normal; }
}
@media print {
  body { max-width: none; margin: 0; } section { break-inside: avoid; } table { font-size: .7rem; }
}
"""


def page(title: str, groups: Sequence[Group], trends: Sequence[SizeTrends], data: dict[str, Any]) -> str:
    """The page.

    Args:
        title: of the study.
        groups: what was compared.
        trends: power laws over sizes.
        data: the content of study.json, for origin and texts.
    """
    heading = f"Gaps to {groups[0].study.baseline}: {title}" if groups else f"{title}: no pair is finished"
    body = "".join(map(_section, groups)) + "".join(map(_trends, trends))
    body += "".join(f"<p>{escape(each)}</p>" for each in data.get("unpaired", ()))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><h1>{escape(heading)}</h1>{_introduction(data)}{body}{_origin(data)}</body></html>\n"
    )


def _introduction(data: dict[str, Any]) -> str:
    unfinished = f" {data['unfinished']} cells are not finished." if data["unfinished"] else ""
    return (
        "<p>Loss of each recipe minus that of the baseline, in nats per token, within pairs of equal size, "
        "text, length and seed. Intervals are 95 % (Student’s t over pairs). “Held out, bf16” is the gap of "
        "the trained weights, evaluated in bf16 on text that no run has read; “forward noise” is what the "
        "same weights lose in their own precision. CPU time is that of a training step, relative to the "
        "baseline, in pairs from one processor. Bars in the pictures are intervals. "
        "Replicas repeat a recipe with a change that should not matter; they show the noise floor "
        f"(grey band).{unfinished}</p>"
    )


def _section(group: Group) -> str:
    title = f"gap to the baseline, {group.title}"
    drawn = picture({row.label: _curve(row) for row in group.rows}, noise=group.noise_floor(), title=title)
    rows = [("", cells(group, row)) for row in group.rows]
    rows += [(' class="replica"', cells(group, row)) for row in group.noise]
    return _part(group.title, drawn, _table(headings(group), rows), notes(group))


def _trends(trends: SizeTrends) -> str:
    curves = {}
    for label, law in trends.laws.items():
        first, last = min(law.estimates), max(law.estimates)
        sizes = [first * (last / first) ** (number / 20) for number in range(21)]
        line = {} if law.exponent is None else {size / 1e6: law.at(size) for size in sizes}
        intervals = {size / 1e6: _interval(each) for size, each in law.estimates.items()}
        curves[label] = Curve(line, intervals)
    drawn = picture(curves, noise=None, title=trends.title, axis="million parameters", is_logarithmic=True)
    table = _table(TREND_HEADINGS, [("", row) for row in trend_rows(trends)])
    return _part(trends.title, drawn, table, [trend_note(trends)])


def _curve(row: Row) -> Curve:
    line = {float(step): gap for step, gap in row.curve.items()}
    return Curve(line, {float(step): _interval(gap) for step, gap in row.gaps.items()})


def _interval(value: Estimate) -> tuple[float, float, float]:
    low, high = (value.mean if each is None else each for each in (value.low, value.high))
    return low, value.mean, high


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    first = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr{kind}>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for kind, row in rows
    )
    return f'<div class="wide"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def _part(title: str, drawn: str, table: str, said: Sequence[str]) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in said)
    return f"<section><h2>{escape(title)}</h2>{drawn}{table}{lines}</section>\n"


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
        place = made["processor"] or made["machine"]
        line = f"commit <code>{escape(str(made['commit']))}</code>, {escape(f'{versions}, {place}')}"
        counts[line] = counts.get(line, 0) + 1
    return "".join(f"<li>{count} cells: {line}</li>" for line, count in counts.items())
