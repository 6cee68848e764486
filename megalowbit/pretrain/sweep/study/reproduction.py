"""Runs one cell of a finished study again, from its `study.json` alone, and compares the results."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError, unknown_name
from megalowbit.layers.cpu_gemm import VARIABLE
from megalowbit.pretrain.sweep.study.cells import Cell
from megalowbit.pretrain.sweep.study.kept_results import KeptStudy, read_kept
from megalowbit.pretrain.sweep.study.results import Result
from megalowbit.pretrain.sweep.study.study_file import MODEL_CONFIG
from megalowbit.pretrain.sweep.study.texts import TextFacts

LISTS = ("sizes", "recipes", "replicas")
BASE, MODEL, STUDY = "base.json", "model.json", "study-file.json"


def unpack(results: Path, name: str, folder: Path) -> tuple[Path, KeptStudy]:
    """Write the study of a `study.json` into a folder, as files that can be run.

    Returns:
        The path of the study's file, and what was read.

    Raises:
        UserError: `results` is no such file, or has no such cell.
    """
    kept = read_kept(results)
    if name not in kept.results:
        raise unknown_name("cell", name, kept.results)
    base, model = copy.deepcopy(kept.content.base), kept.results[name].settings.model
    study = {**copy.deepcopy(kept.content.study), "base": BASE}
    try:
        if model is not None:
            base.setdefault("megalowbit", {}).setdefault("model", {})["config"] = MODEL
            entries = [each for key in LISTS for each in study.get(key, ())]
            for entry in (study, *entries):
                entry.get("set", {}).pop(MODEL_CONFIG, None)  # the path of a file that may be gone
    except (AttributeError, TypeError):
        raise UserError(f"{results} is damaged ('study' or 'base'): restore the file") from None
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, value in ((BASE, base), (MODEL, model), (STUDY, study)):
        with atomic_file(folder / file_name) as file:
            file.write(json.dumps(value, indent=1) + "\n")
    return folder / STUDY, kept


def check_settings(kept: KeptStudy, cell: Cell, facts: TextFacts) -> None:
    """Check that a cell is run with the recorded settings, but for the run's name, which is that of a file.

    Raises:
        UserError: it is not; the message names the differences.
    """
    recorded = kept.results[cell.name]
    before, now = recorded.settings.model_dump(), cell.settings(facts)
    try:
        before["config"]["megalowbit"]["run"]["name"] = now["config"]["megalowbit"]["run"]["name"]
    except (KeyError, TypeError):
        raise UserError(f"{kept.path}: {cell.name} is damaged ('settings'): restore the file") from None
    if found := cell.changed_settings(before, now):
        commit = recorded.made_with.commit
        raise UserError(
            f"{kept.path}: {cell.name} would run with other settings than recorded: {found}: restore the "
            f"file, or use its commit, {commit}"
        )


def use_recorded_gemm(recorded: Result) -> None:
    """Let cells multiply in the recorded dtype, not in the faster one; MEGALOWBIT_CPU_GEMM has priority."""
    if recorded.made_with.gemm is not None and not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = recorded.made_with.gemm


def difference(before: float, now: float) -> float:
    """How far two numbers are apart; infinite if only one of them is NaN."""
    if math.isnan(before) or math.isnan(now):
        return 0.0 if math.isnan(before) and math.isnan(now) else math.inf
    return abs(now - before)


def deviations(recorded: Result, cell: Cell) -> Iterator[tuple[str, float, float]]:
    """What was recorded and what was found: name, before, now. NaN: there is none, or it is not finite."""
    result = cell.result()
    if result is None:
        raise UserError(f"{cell.name} is not finished: see its log")
    before = recorded.loss_means(cell.block)
    now = result.loss_means(before.block)
    window, steps = cell.study.window, cell.steps
    for step in sorted({*range(window, steps, window), *(m for m in cell.study.marks if m < steps), steps}):
        yield f"loss to {step}", before.mean_to(step, window), now.mean_to(step, window)
    for precision in ("bf16", "own"):
        both = [getattr(each.heldout, precision, None) for each in (recorded, result)]
        one, other = (math.nan if each is None else each for each in both)
        yield f"held out, {precision}", one, other


def has_equal_losses(recorded: Result, cell: Cell) -> bool:
    """Whether the losses of all steps have the same bits, by their SHA-256."""
    result = cell.result()
    return (
        result is not None and recorded.loss_means(cell.block).sha256 == result.loss_means(cell.block).sha256
    )


def other_processor(recorded: Result, cell: Cell) -> str:
    """A line on why a cell has other losses that was, or may have been, multiplied otherwise; else empty."""
    result, before = cell.result(), recorded.made_with
    is_same = None if result is None else result.made_with.same_place(before)
    if result is None or is_same:
        return ""
    differ = "differ" if is_same is False else "may differ, as no instructions were recorded,"
    return (
        f"It was made on {before.place()}, and this is {result.made_with.place()}. They {differ} in the last "
        "bits, which training amplifies: .02 nats are usual for a single run.\n"
    )
