"""Runs one cell in this process: training, evaluation, result.

A cell is locked while it runs. A cell that was killed continues from its newest checkpoint; without one it
begins again. Its training loss is recorded for every step, so that marks and windows can be chosen later.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megalowbit.durable_files import open_regular
from megalowbit.errors import TransientError, UserError
from megalowbit.pretrain.command_line import main as pretrain
from megalowbit.pretrain.sweep.runs import RANK_VARIABLES, free_port
from megalowbit.pretrain.sweep.study.cells import LOCKS, RESULT, SETTINGS, Cell
from megalowbit.pretrain.sweep.study.evaluation import heldout_losses
from megalowbit.pretrain.sweep.study.texts import TextFacts

FORMAT = 1


@contextmanager
def locked(cell: Cell) -> Iterator[None]:
    """Hold the cell's lock, which ends with the process.

    Raises:
        TransientError: another process runs the cell.
    """
    folder = cell.folder / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    with open_regular(folder / cell.name, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TransientError(f"{cell.name} is run by another process: wait for it") from None
        yield


def run_cell(cell: Cell, text: TextFacts) -> bool:
    """Run a cell to its end, or until a stop signal; does nothing if it is finished.

    Returns:
        Whether it is finished.

    Raises:
        TransientError: another process runs it.
        UserError: the run has failed, or was started with other settings. Divergence is a result.
    """
    with locked(cell):
        settings = cell.settings(text)
        is_known = cell.check_settings(settings)
        if cell.result() is not None:
            return True
        if not is_known:
            cell.write(SETTINGS, settings)
        started, cpu_started, first = time.perf_counter(), _cpu_seconds(), len(cell.run.rows())
        code = _train(cell)
        run = cell.run
        diverged = run.diverged_at()
        rows = run.rows()
        if len(rows) < cell.steps and not code:
            return False  # stopped by a signal, perhaps after a loss that was not finite
        if code and diverged is None:
            raise UserError(f"{cell.name} has failed with exit code {code}: see its log")
        cost = {
            "wall_seconds": time.perf_counter() - started,
            "cpu_seconds": _cpu_seconds() - cpu_started,
            "steps": len(rows) - min(first, len(rows)),  # that these seconds were for
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
                "made_with": made_with(cell.program.parent.parent),
            },
        )
        tidy(cell)
        return True


def tidy(cell: Cell) -> None:
    """Remove what a finished cell no longer needs."""
    shutil.rmtree(cell.path / "checkpoints", ignore_errors=True)
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


def made_with(root: Path) -> dict[str, Any]:
    """Commit, versions and machine."""
    import torch
    import transformers

    return {
        "commit": commit(root),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "processor": _processor(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def commit(root: Path) -> str | None:
    """The commit of the code, with `-dirty` if files differ from it; None outside a repository."""
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
