"""Writes what a study has found: `study.json`, `study.html` and `study.md`.

`study.json` has everything that a cell needs to be run again (the study, the contents of its base
configuration and model, the SHA-256 of its texts), and of each finished cell its settings, losses, cost and
origin. Reports of other folders can take its cells over, see `kept_results.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalowbit.config.deepspeed_json import load_json
from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object
from megalowbit.pretrain.sweep.study.cells import TEXTS, Cell, check_folder
from megalowbit.pretrain.sweep.study.kept_results import FORMAT, to_kept
from megalowbit.pretrain.sweep.study.report.analysis import Group, groups_of
from megalowbit.pretrain.sweep.study.report.costs import RecipeCost, costs_of
from megalowbit.pretrain.sweep.study.report.finished import finished_cells
from megalowbit.pretrain.sweep.study.report.page import page
from megalowbit.pretrain.sweep.study.report.power_law import LEAST_SIZES
from megalowbit.pretrain.sweep.study.report.sizes import SizeTrends, count_parameters, not_fitted, trends_of
from megalowbit.pretrain.sweep.study.report.tables import costs_markdown, markdown, trends_markdown
from megalowbit.pretrain.sweep.study.results import made_with
from megalowbit.pretrain.sweep.study.study_file import StudySettings
from megalowbit.pretrain.sweep.study.texts import FACTS, facts_in

STUDY_JSON = "study.json"
LINE_EACH = ("cells", "groups")  # their entries are long: one line each


def write_report(
    study: StudySettings, description: Mapping[str, Any], cells: Sequence[Cell], out: Path
) -> str:
    """Write the report of all finished cells; returns the tables in Markdown.

    Args:
        study: the study.
        description: the content of its file.
        cells: all its cells.
        out: folder of the study.

    Raises:
        UserError: a result is damaged, has other settings or is of another study, or cells cannot be
            compared.
    """
    check_folder(cells)
    _check_settings(study, cells, out)
    _check_earlier_report(cells, out)
    results = Results.of(study, cells)
    groups, trends, costs = results.groups, results.trends, results.costs
    parts = [
        markdown(groups),
        trends_markdown(trends),
        *results.missing,
        costs_markdown(costs, study.baseline),
    ]
    text = "\n\n".join(part for part in parts if part)
    data = {**to_json(study, description, cells, out), **results.to_dict()}
    with atomic_file(out / STUDY_JSON) as file:
        file.write(to_text(data))
    for name, content in (
        ("study.md", text + "\n"),
        ("study.html", page(out.name, groups, trends, costs, data)),
    ):
        with atomic_file(out / name) as file:
            file.write(content)
    return text


@dataclass(frozen=True)
class Results:
    """What the finished cells of a study show.

    Attributes:
        groups: the gaps.
        trends: their power laws over sizes.
        costs: of the recipes.
        missing: sentences about what has no figures.
    """

    groups: list[Group]
    trends: list[SizeTrends]
    costs: list[RecipeCost]
    missing: list[str]

    @classmethod
    def of(cls, study: StudySettings, cells: Sequence[Cell]) -> Results:
        """Analyse the finished ones of these cells."""
        groups = groups_of(study, cells)
        sizes = {group.size for group in groups if study.size(group.size).stress_of is None}
        is_wide = len(sizes) >= LEAST_SIZES
        return cls(
            groups,
            trends_of(groups, count_parameters(cells)) if is_wide else [],
            costs_of([each.cell for each in finished_cells(cells)]),
            unpaired(study, cells, groups) + not_fitted(groups),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "groups": [each.to_dict() for each in self.groups],
            "sizes": [each.to_dict() for each in self.trends],
            "costs": [each.to_dict() for each in self.costs],
            "missing": self.missing,
        }


def unpaired(study: StudySettings, cells: Sequence[Cell], groups: Sequence[Group]) -> list[str]:
    """What is finished without a pair: a sentence for each size, length and text that is in no group."""
    finished, has_pairs = finished_cells(cells), {(group.size, group.steps, group.text) for group in groups}
    if not finished:
        return [f"No cell is finished: {len(cells)} are left."]
    places: dict[tuple[str, int, str], dict[str, list[int]]] = {}
    for each in finished:
        cell = each.cell
        seeds = places.setdefault((cell.size.name, cell.steps, cell.text), {})
        seeds.setdefault(cell.label, []).append(cell.seed)
    found = []
    for place, seeds in places.items():
        if place in has_pairs:
            continue
        with_baseline = set(seeds.get(study.baseline, ()))
        has_common = any(with_baseline & set(of) for label, of in seeds.items() if label != study.baseline)
        why = (
            f"{study.baseline}, or a fork of it, has diverged or is not finished for the seeds of the others"
            if has_common
            else f"no run has a seed in common with {study.baseline}, or with what it repeats"
        )
        done = "; ".join(f"{label}: {', '.join(map(str, sorted(of)))}" for label, of in seeds.items())
        found.append(f"No gaps for {Group(study, *place, {}).title}: {why}. Finished seeds: {done}.")
    return found


def _check_settings(study: StudySettings, cells: Sequence[Cell], out: Path) -> None:
    texts = {text.name: facts_in(out / TEXTS / text.name) for text in study.texts}
    for cell in cells:
        facts = texts[cell.text]
        if (result := cell.result()) is None:
            continue
        if facts is None:
            raise UserError(f"{out / TEXTS / cell.text / FACTS} is missing, but {cell.name} is finished")
        settings = cell.settings(facts)
        cell.check_settings(settings)
        if found := cell.changed_settings(result.settings.model_dump(), settings):
            raise UserError(f"the result in {cell.path} is of another cell: {found}: remove it to run again")


def _check_earlier_report(cells: Sequence[Cell], out: Path) -> None:
    """Check that no finished cell of the report that is there would be missing in the new one.

    Raises:
        UserError: one would, for example because its folder was moved away.
    """
    path = out / STUDY_JSON
    if not path.exists():
        return
    earlier = read_json_object(path).get("cells")
    known = {cell.name for cell in cells if cell.result() is not None}
    lost = sorted(set(earlier if isinstance(earlier, dict) else ()) - known)
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UserError(
            f"{path} has cells that are not finished here ({lost[0]}{more}) and would be lost: take them "
            f"over with --from {path}, use another --out, or move the file away"
        )


def to_text(data: Mapping[str, Any]) -> str:
    """A study.json: entries of `cells` and `groups` have one line each."""
    text = json.dumps({**data, **{key: type(data[key])() for key in LINE_EACH}}, indent=1, allow_nan=False)
    for key in LINE_EACH:
        entries = data[key]
        pairs = entries.items() if isinstance(entries, Mapping) else (("", each) for each in entries)
        lines = [
            "\n  " + (f"{json.dumps(name)}: " if name else "") + json.dumps(each, allow_nan=False)
            for name, each in pairs
        ]
        start, end = ("{", "}") if isinstance(entries, Mapping) else ("[", "]")
        empty = f'\n "{key}": {start}{end}'
        if lines:
            text = text.replace(empty, f'\n "{key}": {start}{",".join(lines)}\n {end}', 1)
    return text + "\n"


def to_json(
    study: StudySettings,
    description: Mapping[str, Any],
    cells: Sequence[Cell],
    out: Path,
) -> dict[str, Any]:
    """The study, its finished cells, and what they were made with."""
    finished = finished_cells(cells)
    root = cells[0].program.parent.parent
    base = load_json(study.base)
    model = base.get("megalowbit", {}).get("model", {}).get("config")
    model_content = None if model is None else read_json_object(study.base.parent / model)
    facts = {text.name: out / TEXTS / text.name / FACTS for text in study.texts}
    return {
        "format": FORMAT,
        "study": {**description, "texts": [text.model_dump(mode="json") for text in study.texts]},
        "base": base,
        "model": model_content,
        "texts": {name: read_json_object(path) for name, path in facts.items() if path.exists()},
        "report_made_with": made_with(root),
        **to_kept({each.cell.name: (each.cell, each.result) for each in finished}, root),
        "unfinished": len(cells) - len(finished),
    }
