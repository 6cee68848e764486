"""Reads what a run has left in its folder: metrics, layer tables, attempts, checkpoints, configuration.

A run may have been killed in the middle of a line, or still be running, so nothing here fails because of a
damaged line: it is counted, and the diagnosis says so. Only a folder that is no run is an error. Files of
100,000 steps are read in seconds: only the columns that findings use are kept.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megalowbit.durable_files import complete_steps, damaged_in
from megalowbit.errors import UserError, file_system_error
from megalowbit.findings.layer_tables import LayerTables, read_layers
from megalowbit.json_text import read_text
from megalowbit.pretrain.run_folder.folder import LOCK, run_folder_of
from megalowbit.records.attempts import BEGUN, ENDED, read_attempts
from megalowbit.records.files import ATTEMPTS, CONFIG, LAYERS, METRICS, SUMMARY, object_if_any
from megalowbit.records.finish import Finish, planned_steps, read_finish
from megalowbit.records.lines import step_in
from megalowbit.records.metrics import Metrics, read_metrics
from megalowbit.values import BLOCK

UNUSED = ("quantization/", "milliseconds/", "speculation/")  # by findings; most figures of a step
LARGEST_REFUSAL = 2**20  # bytes
DEVIATION = "initializer_range"
LEAST_DEVIATION, MOST_DEVIATION = 1e-12, 1e12
DEFAULT_INITIAL_DEVIATION = 0.02  # of all families in transformers


@dataclass(frozen=True)
class RunFiles:
    """All that findings read.

    Attributes:
        folder: of the run.
        config: the resolved configuration; empty if it is gone.
        metrics: see there.
        layers: None if nothing was counted.
        attempts: lines of attempts.jsonl and of those of other ranks, by time.
        finish: whether the run has finished, and after which step.
        is_running: whether a process holds the folder's lock.
        damaged_checkpoints: names of folders that were renamed because of damage.
        refusals: lines of user errors that a job script has kept since the last attempt began, by file.
        rollbacks: reasons of rollbacks in summary.json; those lines of metrics.jsonl are gone.
        summary_steps: steps trained, of summary.json; 0 if it does not say.
        notes: what could not be read.
    """

    folder: Path
    config: dict[str, Any]
    metrics: Metrics
    layers: LayerTables | None
    attempts: list[dict[str, Any]]
    finish: Finish
    is_running: bool
    damaged_checkpoints: list[str]
    refusals: dict[str, str]
    rollbacks: list[str]
    summary_steps: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def block(self) -> dict[str, Any]:
        """The `"megalowbit"` block of the configuration."""
        found = self.config.get(BLOCK)
        return found if isinstance(found, dict) else {}

    def setting(self, *keys: str) -> Any:
        """A value in the `"megalowbit"` block; None if it is not there."""
        found: Any = self.block
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 if there is none."""
        return self.metrics.last_step

    @property
    def planned_steps(self) -> int | None:
        """`run.steps`."""
        return planned_steps(self.config)

    @property
    def last_attempt(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """The line with which the last attempt began, and those with which its ranks ended."""
        begun: dict[str, Any] | None = None
        ended: list[dict[str, Any]] = []
        for line in self.attempts:
            if line["event"] == BEGUN:
                begun, ended = line, []
            elif line["event"] == ENDED:
                ended.append(line)
        return begun, ended

    def has_checkpoint_before(self, step: int) -> bool:
        """Whether a complete checkpoint is there to which a run could go back from this step."""
        try:
            return any(each < step for each in complete_steps(self.folder / "checkpoints"))
        except UserError:
            return False  # the folder cannot be read

    @cached_property
    def initial_deviation(self) -> tuple[float, str]:
        """Standard deviation of the initial weights, and the file that says so."""
        overrides, model = self.setting("model", "overrides"), self.setting("model", "config")
        if isinstance(overrides, dict) and _is_deviation(overrides.get(DEVIATION)):
            return float(overrides[DEVIATION]), CONFIG
        candidates = [self.folder / "hf" / CONFIG]
        if isinstance(model, str):
            candidates.insert(0, Path(model))
        for path in candidates:
            found = object_if_any(path, self.notes if path.is_relative_to(self.folder) else [])
            if _is_deviation(found.get(DEVIATION)):
                return float(found[DEVIATION]), path.name
            if found:
                break
        return DEFAULT_INITIAL_DEVIATION, "the default of transformers"


def _is_deviation(value: object) -> bool:
    return isinstance(value, (int, float)) and LEAST_DEVIATION < value < MOST_DEVIATION


def read_run(path: Path) -> RunFiles:
    """Read the run that `path` is, or is in.

    Raises:
        UserError: there is no such folder, or it holds no run.
    """
    folder = _folder_of(path)
    metrics = read_metrics(folder / METRICS, without=UNUSED)
    notes = list(metrics.notes)
    attempts = read_attempts(folder, notes)
    config = _read_config(folder / CONFIG, notes)
    summary = object_if_any(folder / SUMMARY, notes)
    begun = [line["time"] for line in attempts if line["event"] == BEGUN]
    return RunFiles(
        folder=folder,
        config=config,
        metrics=metrics,
        layers=read_layers(folder / LAYERS, notes),
        attempts=attempts,
        finish=read_finish(folder, config, metrics.last_step, notes),
        is_running=_is_locked(folder / LOCK),
        damaged_checkpoints=damaged_in(folder / "checkpoints"),
        refusals=_read_refusals(folder / "slurm", notes, since=max(begun, default=0.0)),
        rollbacks=_rollbacks(summary),
        summary_steps=step_in({"step": summary.get("steps")}) or 0,
        notes=notes,
    )


def _folder_of(path: Path) -> Path:
    try:
        if not path.exists():
            raise UserError(f"{path} does not exist: name the folder of a run (--run-dir)")
        found = run_folder_of(path)
    except OSError as error:
        raise file_system_error(
            f"{path} cannot be read ({error.strerror}): make it readable", error
        ) from error
    except UserError:
        if not path.exists():
            raise
        found = path  # a damaged configuration is a part of the diagnosis
    if found is None and path.is_dir() and any((path / name).exists() for name in (METRICS, ATTEMPTS)):
        found = path
    if found is None:
        raise UserError(
            f"{path} holds no run: it has neither a {CONFIG} with a {BLOCK!r} block nor a {METRICS}; name "
            "the folder of a run (--run-dir)"
        )
    return found


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        notes.append(f"{path.name} is missing: learning rate, precision and number of steps are not known")
        return {}
    return object_if_any(path, notes)


def _read_refusals(folder: Path, notes: list[str], *, since: float) -> dict[str, str]:
    found = {}
    for path in sorted(folder.glob("refusal-*")):
        try:
            if path.stat().st_mtime >= since:
                found[f"slurm/{path.name}"] = read_text(path, largest=LARGEST_REFUSAL).strip()
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            notes.append(f"{path} cannot be read ({error.strerror})")
        except UserError as error:
            notes.append(str(error))
    return {name: text for name, text in found.items() if text}


def _rollbacks(summary: dict[str, Any]) -> list[str]:
    """The reasons in summary.json."""
    listed = summary.get("rollbacks")
    reasons = listed if isinstance(listed, list) else []
    return [str(each["reason"]) for each in reasons if isinstance(each, dict) and each.get("reason")]


def _is_locked(lock: Path) -> bool:
    """Whether a process holds the folder's lock; it is only tried, and released at once."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
