"""Runs one cell in this process: training, evaluation, result.

A cell is locked while it runs. A cell that was killed continues from its newest checkpoint; without one it
begins again. Its training loss is recorded for every step, so that marks and windows can be chosen later.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError

from megalowbit.durable_files import complete_steps
from megalowbit.errors import DivergenceError, UserError
from megalowbit.hf.training_checkpoint import CHECKPOINTS_FOLDER
from megalowbit.json_text import read_json_object
from megalowbit.layers.cpu_gemm import VARIABLE, cpu_gemm
from megalowbit.pretrain.checks import this_device
from megalowbit.pretrain.command_line import main as pretrain
from megalowbit.pretrain.sweep.runs import RANK_VARIABLES, free_port
from megalowbit.pretrain.sweep.study.cells import RESULT, SETTINGS, Cell, locked
from megalowbit.pretrain.sweep.study.evaluation import heldout_losses
from megalowbit.pretrain.sweep.study.results import Origin, Recorded, made_with
from megalowbit.pretrain.sweep.study.texts import TextFacts
from megalowbit.records.attempts import ENDED, read_attempts

FORMAT = 1
PARTS = "parts.json"


class Part(Recorded):
    """What a part of a run took, from its start to a stop signal or its end."""

    steps: int
    wall_seconds: float
    cpu_seconds: float


class Parts(Recorded):
    """The file `parts.json` of a cell: what its parts were made with, and what those took that ended well."""

    begun_with: list[Origin] = Field(default_factory=list)
    parts: list[Part]


def run_cell(cell: Cell, text: TextFacts) -> bool:
    """Run a cell to its end, or until a stop signal; does nothing if it is finished.

    Returns:
        Whether it is finished.

    Raises:
        TransientError: another process runs it.
        UserError: the run has failed, or was started with other settings or versions. Divergence is a result.
    """
    with locked(cell):
        settings = cell.settings(text)
        is_known = cell.check_settings(settings)
        if cell.result() is not None:
            return True
        if not is_known:
            cell.write(SETTINGS, settings)
        record = _begin(cell)
        parts = record.parts
        started, cpu_started, first = time.perf_counter(), _cpu_seconds(), len(cell.run.rows())
        code = _train(cell)
        run = cell.run
        diverged = run.diverged_at()
        rows = run.rows()
        part = Part(
            steps=max(0, len(rows) - first),
            wall_seconds=time.perf_counter() - started,
            cpu_seconds=_cpu_seconds() - cpu_started,
        )
        parts.append(part)
        if len(rows) < cell.steps and not code:  # stopped by a signal, perhaps after a loss of NaN
            cell.write(PARTS, record.model_dump())
            return False
        if code and (diverged is None or not _has_diverged(cell)):
            raise UserError(f"{cell.name} has failed with exit code {code}: see its log")
        cost = {
            "wall_seconds": sum(each.wall_seconds for each in parts),
            "cpu_seconds": sum(each.cpu_seconds for each in parts),
            "steps": sum(each.steps for each in parts),  # fewer than all if a part was killed
            "seconds_of_steps": sum(_seconds(row, rows) for row in rows),
            "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
        }
        weights = cell.path / "hf"
        losses = None if diverged else heldout_losses(cell.config, weights, cell.heldout)
        cell.write(
            RESULT,
            {
                "format": FORMAT,
                "settings": settings,
                "losses": [row["loss"] for row in rows],
                "skipped_steps": rows[-1]["skipped_steps"] if rows else 0,
                "tokens": rows[-1]["tokens"] if rows else 0,
                "diverged_at": diverged,
                "heldout": losses,
                "cost": cost,
                "made_with": _joined(record.begun_with),
            },
        )
        tidy(cell)
        return True


def _has_diverged(cell: Cell) -> bool:
    """Whether that is what has ended the run: after a loss of NaN, a full disk may have."""
    ended = [each for each in read_attempts(cell.path, []) if each["event"] == ENDED]
    return bool(ended) and ended[-1].get("error") == DivergenceError.__name__


def _begin(cell: Cell) -> Parts:
    """Record what this part is made with, before it can be killed; returns what is known of earlier ones.

    Raises:
        UserError: an earlier part was made with another version of a package on which numbers depend.
    """
    path = cell.path / PARTS
    record = Parts(parts=[])
    if path.exists() and complete_steps(cell.path / CHECKPOINTS_FOLDER):  # else training begins again
        try:
            record = Parts.model_validate(read_json_object(path))
        except ValidationError:
            raise UserError(f"{path} is damaged: remove {cell.path} to run the cell again") from None
    # now, not at the end: the checkout may change meanwhile
    origin = Origin.model_validate(
        {**made_with(cell.program.parent.parent), "gemm": _gemm(cell, record.begun_with)}
    )
    for earlier in record.begun_with:
        if other := earlier.other_version(origin):
            name, before, now = other
            raise UserError(
                f"{cell.name} was begun with {name} {before}, and {now} is installed: install {before}, or "
                f"remove {cell.path} to run the cell again"
            )
    record.begun_with.append(origin)
    cell.write(PARTS, record.model_dump())
    return record


def _joined(origins: Sequence[Origin]) -> dict[str, Any]:
    """The origin of a result: the last part's, with all commits and processors if the cell was resumed."""
    joined = {
        key: " and ".join(dict.fromkeys(getattr(each, key) or "unknown" for each in origins))
        for key in ("commit", "processor", "units")
        if any(getattr(each, key) for each in origins)
    }
    return {**origins[-1].model_dump(), **joined}


def _gemm(cell: Cell, begun_with: Sequence[Origin]) -> str | None:
    """The dtype in which a cell multiplies; None if that is no choice, or not known.

    A cell that continues keeps the dtype of its checkpoint, which earlier versions did not record here.

    Raises:
        UserError: `MEGALOWBIT_CPU_GEMM` names another one than an earlier part had.
    """
    is_choice = this_device().type == "cpu" and cell.config.parts.settings.precision == "bf16"
    if not is_choice:
        return None
    if not begun_with:
        return cpu_gemm()
    before, named = begun_with[0].gemm, os.environ.get(VARIABLE)
    if before and named and named != before:
        raise UserError(
            f"{cell.name} was begun with {VARIABLE}={before}, and now it is {named}: set it to {before}, or "
            f"remove {cell.path} to run the cell again"
        )
    return before


def tidy(cell: Cell) -> None:
    """Remove what a finished cell no longer needs."""
    shutil.rmtree(cell.path / CHECKPOINTS_FOLDER, ignore_errors=True)
    if not cell.study.keep_weights:
        shutil.rmtree(cell.path / "hf", ignore_errors=True)


def _train(cell: Cell) -> int:
    """Run launch/pretrain.py's command line in this process; returns its exit code."""
    for name in (*RANK_VARIABLES, "SLURM_PROCID"):  # a cell is one process, whatever has started it
        os.environ.pop(name, None)
    os.environ["MASTER_PORT"] = str(free_port())
    arguments = ["--ds-config", str(cell.study.base), "--run-dir", str(cell.path), "--resume", "auto"]
    for override in cell.overrides:
        arguments += ["--set", override]
    return pretrain(arguments)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _seconds(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """Seconds of a step by its recorded rate."""
    rate = row.get("tokens_per_second")
    return rows[-1]["tokens"] / len(rows) / rate if rate else 0.0
