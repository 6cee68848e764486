"""Runs one cell of a finished study again, from its `study.json` alone, and compares the results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError, unknown_name
from megalowbit.json_text import read_json_object
from megalowbit.pretrain.sweep.study.cells import Cell
from megalowbit.pretrain.sweep.study.report.analysis import Finished
from megalowbit.pretrain.sweep.study.study_file import MODEL_CONFIG
from megalowbit.pretrain.sweep.study.texts import TextFacts

BASE, MODEL, STUDY = "base.json", "model.json", "study-file.json"


def unpack(results: Path, name: str, folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Write the study of a `study.json` into a folder, as files that can be run.

    Returns:
        The path of the study's file, and the recorded result of the cell `name`.

    Raises:
        UserError: `results` is no such file, or has no such cell.
    """
    data = read_json_object(results)
    missing = [key for key in ("study", "base", "model", "texts", "cells") if key not in data]
    if missing:
        raise UserError(f"{results} has no {missing[0]!r}: name a study.json that tools/study.py has written")
    if name not in data["cells"]:
        raise unknown_name("cell", name, data["cells"])
    base, model = data["base"], data["cells"][name].get("model", data["model"])
    study = {**data["study"], "base": BASE}
    if model is not None:
        base["megalowbit"]["model"]["config"] = MODEL
        for entry in (study, *study["sizes"], *study["recipes"], *study.get("replicas", ())):
            entry.get("set", {}).pop(MODEL_CONFIG, None)  # the path of a file that may be gone
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, value in ((BASE, base), (MODEL, model), (STUDY, study)):
        with atomic_file(folder / file_name) as file:
            file.write(json.dumps(value, indent=1) + "\n")
    return folder / STUDY, data["cells"][name]


def check_text(recorded: Mapping[str, Any], facts: TextFacts) -> None:
    """Compare a text with the recorded one.

    Raises:
        UserError: it is another text, perhaps because of another version.
    """
    for key in ("train_sha256", "heldout_sha256"):
        if recorded[key] != getattr(facts, key):
            raise UserError(
                f"the text is not that of the study: {facts.description}, not {recorded['description']}: "
                "install that version"
            )


def difference(before: float, now: float) -> float:
    """How far two numbers are apart; infinite if only one of them is NaN."""
    if math.isnan(before) or math.isnan(now):
        return 0.0 if math.isnan(before) and math.isnan(now) else math.inf
    return abs(now - before)


def deviations(recorded: Mapping[str, Any], cell: Cell) -> Iterator[tuple[str, float, float]]:
    """What was recorded and what was found: name, before, now. NaN: the run has diverged."""
    result = cell.result()
    if result is None:
        raise UserError(f"{cell.name} is not finished: see its log")
    again = Finished(cell, result)
    for step, before in recorded["losses"].items():
        yield f"loss to {step}", math.nan if before is None else before, again.loss_to(int(step))
    if recorded["heldout"] is not None:
        for precision in ("bf16", "own"):
            yield f"held out, {precision}", recorded["heldout"][precision], again.heldout(precision)
