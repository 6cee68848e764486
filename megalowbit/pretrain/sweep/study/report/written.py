"""Writes what a study has found: `study.json`, `study.html` and `study.md`.

`study.json` has everything that a cell needs to be run again (the study, the contents of its base
configuration and model, the SHA-256 of its texts), and of each finished cell its losses, cost and origin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalowbit.config.deepspeed_json import load_json
from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object
from megalowbit.pretrain.sweep.study.cell_run import made_with
from megalowbit.pretrain.sweep.study.cells import TEXTS, Cell, check_folder
from megalowbit.pretrain.sweep.study.report.analysis import Finished, Group, groups_of
from megalowbit.pretrain.sweep.study.report.page import page
from megalowbit.pretrain.sweep.study.report.tables import markdown
from megalowbit.pretrain.sweep.study.study_file import StudySettings
from megalowbit.pretrain.sweep.study.texts import FACTS, facts_in

FORMAT = 1


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
    groups = groups_of(study, cells)
    text = markdown(groups)
    data = to_json(study, description, cells, groups, out)
    with atomic_file(out / "study.json") as file:
        file.write(json.dumps(data, indent=1, allow_nan=False) + "\n")
    for name, content in (("study.md", text + "\n"), ("study.html", page(out.name, groups, data))):
        with atomic_file(out / name) as file:
            file.write(content)
    return text


def _check_settings(study: StudySettings, cells: Sequence[Cell], out: Path) -> None:
    texts = {text.name: facts_in(out / TEXTS / text.name) for text in study.texts}
    for cell in cells:
        facts = texts[cell.text]
        if cell.result() is not None:
            if facts is None:
                raise UserError(f"{out / TEXTS / cell.text / FACTS} is missing, but {cell.name} is finished")
            cell.check_settings(cell.settings(facts))


def to_json(
    study: StudySettings,
    description: Mapping[str, Any],
    cells: Sequence[Cell],
    groups: Sequence[Group],
    out: Path,
) -> dict[str, Any]:
    """All data of a study."""
    finished = [Finished(cell, result) for cell in cells if (result := cell.result()) is not None]
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
        "report_made_with": made_with(cells[0].program.parent.parent),
        "commits": sorted({str(each.result["made_with"]["commit"]) for each in finished}),
        "cells": {each.cell.name: _cell(each, model_content) for each in finished},
        "unfinished": sum(cell.result() is None for cell in cells),
        "groups": [group.to_dict() for group in groups],
    }


def _cell(each: Finished, model: Mapping[str, Any] | None) -> dict[str, Any]:
    """A result without the loss of every step: only the means that end at multiples of the window.

    A model other than the base configuration's comes with it.
    """
    cell, result = each.cell, each.result
    window = cell.study.window
    steps = sorted(
        {*range(window, cell.steps, window), *(m for m in cell.study.marks if m < cell.steps), cell.steps}
    )
    losses = {str(step): each.loss_to(step) for step in steps if step <= len(result["losses"])}
    return {
        **result["settings"]["cell"],
        "settings_of_config": result["settings"]["config"],
        **({} if (own := result["settings"].get("model")) == model else {"model": own}),
        "losses": {step: loss for step, loss in losses.items() if loss == loss},
        **{
            key: result[key]
            for key in ("tokens", "skipped_steps", "diverged_at", "heldout", "cost", "made_with")
        },
    }
