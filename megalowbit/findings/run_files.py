"""Reads what a run has left in its folder: metrics, layer tables, attempts, checkpoints, configuration.

A run may have been killed in the middle of a line, or still be running, so nothing here fails because of a
damaged line: it is counted, and the diagnosis says so. Only a folder that is no run is an error. Files of
100,000 steps are read in seconds: only the columns that findings use are kept.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megalowbit.config.deepspeed_json import BLOCK
from megalowbit.durable_files import damaged_in, steps_in
from megalowbit.errors import UserError, file_system_error
from megalowbit.findings.robust import Array
from megalowbit.json_text import read_json_object, read_text
from megalowbit.pretrain.run_folder.attempts import ATTEMPTS, BEGUN, ENDED, RANK_ATTEMPTS
from megalowbit.pretrain.run_folder.folder import CONFIG, LOCK, METRICS, run_folder_of

LAYERS = "overflow_layers.jsonl"
TABLES_KEPT = 200  # of a long run: evenly spread, and the last
NUMBERS = (
    "loss", "lr", "grad_norm", "loss_scale", "skipped_steps", "skipped/rank", "skipped/ranks",
    "skipped/tensors", "tokens_per_second", "rollbacks", "validation/loss", "ranks/slowest",
    "ranks/slowest_milliseconds", "ranks/other_milliseconds", "ranks/highest_loss_rank", "ranks/highest_loss",
    "ranks/other_loss",
)  # fmt: skip
COUNTS = (
    "elements", "saturated", "underflow", "nonfinite", "blocks", "saturated_scales", "zero_blocks",
    "quantizations", "nonfinite_quantizations", "squared_error", "squared_norm",
)  # fmt: skip
LARGEST_REFUSAL = 2**20  # bytes
DEFAULT_INITIAL_DEVIATION = 0.02  # `initializer_range` of all families in transformers


@dataclass(frozen=True)
class Metrics:
    """Columns of metrics.jsonl, by row.

    Attributes:
        steps: (n,) ascending.
        columns: name → (n,) float64; NaN where a row has no value, or NaN was recorded.
        tensors: `skipped/tensor` of each row, or None.
        num_damaged: lines that could not be read, and in `first_damaged` the number of the first one.
    """

    steps: Array
    columns: dict[str, Array]
    tensors: list[str | None]
    num_damaged: int = 0
    first_damaged: int | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> Array:
        found = self.columns.get(name)
        return np.full(len(self.steps), np.nan) if found is None else found

    @property
    def sources(self) -> list[str]:
        """Names of the sources of a blend."""
        return [name.removeprefix("loss/") for name in self.columns if name.startswith("loss/")]

    @cached_property
    def is_skipped(self) -> Any:
        """(n,) bool: whether the update of the step was left out."""
        totals = np.nan_to_num(self["skipped_steps"])
        first = totals[:1] if len(totals) and self.steps[0] == 1 else np.zeros(min(1, len(totals)))
        return np.concatenate([first, np.diff(totals)]) > 0

    def at(self, step: int) -> int:
        """The row of a step, or of the next one that there is."""
        return min(int(np.searchsorted(self.steps, step)), len(self.steps) - 1)


@dataclass(frozen=True)
class LayerTables:
    """The counts of overflow_layers.jsonl between two tables.

    Attributes:
        steps: (t,) of the tables, ascending.
        keys: (layer, role) of each row, in the order of the model.
        counts: name → (t, rows) float64, counted since the table before; NaN where a table lacks a row.
    """

    steps: Array
    keys: list[tuple[str, str]]
    counts: dict[str, Array]

    def rows_of(self, role: str) -> list[int]:
        """The rows of one operand."""
        return [number for number, key in enumerate(self.keys) if key[1] == role]

    def first_step_of(self, table: int) -> int:
        """The first step that a table may have counted."""
        return int(self.steps[table - 1]) + 1 if table else 1


@dataclass(frozen=True)
class RunFiles:
    """All that findings read.

    Attributes:
        folder: of the run.
        config: the resolved configuration; empty if it is gone.
        metrics: see there.
        layers: None if nothing was counted.
        attempts: lines of attempts.jsonl and of those of other ranks, by time.
        is_done: whether the run has finished.
        is_running: whether a process holds the folder's lock.
        damaged_checkpoints: names of folders that were renamed because of damage.
        saved_steps: steps with a checkpoint.
        stacks: names of files with the stack of a rank that hung.
        refusals: lines of user errors that a job script has kept since the last attempt began, by file.
        rollbacks: reasons of rollbacks in summary.json; those lines of metrics.jsonl are gone.
        notes: what could not be read.
    """

    folder: Path
    config: dict[str, Any]
    metrics: Metrics
    layers: LayerTables | None
    attempts: list[dict[str, Any]]
    is_done: bool
    is_running: bool
    damaged_checkpoints: list[str]
    saved_steps: list[int]
    stacks: list[str]
    refusals: dict[str, str]
    rollbacks: list[str]
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
        return int(self.metrics.steps[-1]) if len(self.metrics) else 0

    @property
    def planned_steps(self) -> int | None:
        """`run.steps`."""
        steps = self.setting("run", "steps")
        return steps if isinstance(steps, int) else None

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

    @cached_property
    def initial_deviation(self) -> tuple[float, str]:
        """Standard deviation of the initial weights, and the file that says so."""
        candidates = [self.folder / "hf" / CONFIG]
        model = self.setting("model", "config")
        if isinstance(model, str):
            candidates.insert(0, Path(model))
        for path in candidates:
            try:
                value = read_json_object(path).get("initializer_range")
            except UserError:
                continue
            if isinstance(value, (int, float)) and 0 < value < math.inf:
                return float(value), path.name
            return DEFAULT_INITIAL_DEVIATION, "the default of transformers"
        return DEFAULT_INITIAL_DEVIATION, "the default of transformers"


def read_run(path: Path) -> RunFiles:
    """Read the run that `path` is, or is in.

    Raises:
        UserError: there is no such folder, or it holds no run.
    """
    folder = _folder_of(path)
    notes: list[str] = []
    metrics = _read_metrics(folder / METRICS, notes)
    attempts = _read_attempts(folder, notes)
    begun = [line["time"] for line in attempts if line["event"] == BEGUN]
    return RunFiles(
        folder=folder,
        config=_read_config(folder / CONFIG, notes),
        metrics=metrics,
        layers=_read_layers(folder / LAYERS, notes),
        attempts=attempts,
        is_done=(folder / "DONE").exists(),
        is_running=_is_locked(folder / LOCK),
        damaged_checkpoints=damaged_in(folder / "checkpoints"),
        saved_steps=_saved_steps(folder / "checkpoints", notes),
        stacks=sorted(each.name for each in folder.glob("stack-rank*.txt")),
        refusals=_read_refusals(folder / "slurm", since=max(begun, default=0.0)),
        rollbacks=_read_rollbacks(folder / "summary.json"),
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
    try:
        return read_json_object(path)
    except UserError as error:
        notes.append(str(error))
        return {}


def _objects(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number and content of each complete line; None: it is damaged. A missing file has no lines."""
    if not path.is_file():  # opening a FIFO would wait for its writer
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    notes.append(f"{path.name} ends in the middle of line {number}, which is left out")
                    return
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    found = None
                yield number, found if isinstance(found, dict) else None
    except OSError as error:
        raise file_system_error(
            f"{path} cannot be read ({error.strerror}): make it readable", error
        ) from error


def _read_metrics(path: Path, notes: list[str]) -> Metrics:
    steps: list[int] = []
    values: dict[str, list[float]] = {name: [] for name in NUMBERS}
    tensors: list[str | None] = []
    num_damaged, first_damaged = 0, None
    for number, row in _objects(path, notes):
        step = None if row is None else row.get("step")
        if row is None or type(step) is not int or (steps and step <= steps[-1]):
            num_damaged, first_damaged = num_damaged + 1, first_damaged or number
            continue
        for name in row:
            if name.startswith("loss/") and name not in values:
                values[name] = [math.nan] * len(steps)
        steps.append(step)
        infinite = row.get("nonfinite")
        infinite = infinite if isinstance(infinite, dict) else {}
        for name, column in values.items():
            column.append(_number(row.get(name), infinite.get(name)))
        tensor = row.get("skipped/tensor")
        tensors.append(tensor if isinstance(tensor, str) else None)
    if num_damaged:
        notes.append(f"{path.name}: {num_damaged} damaged lines are left out, the first is {first_damaged}")
    columns = {name: np.array(column, dtype=np.float64) for name, column in values.items()}
    return Metrics(np.array(steps, dtype=np.float64), columns, tensors, num_damaged, first_damaged)


def _number(value: Any, text: Any) -> float:
    """A recorded number; `text` is what was written instead of one that is not finite."""
    if value is None:
        return math.inf if text == "inf" else -math.inf if text == "-inf" else math.nan
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _read_layers(path: Path, notes: list[str]) -> LayerTables | None:
    """The tables; of a long run, `TABLES_KEPT` of them, which then count over longer intervals."""
    kept = _kept_tables(path)
    tables: dict[int, dict[tuple[str, str], dict[str, Any]]] = {}
    for _, row in _objects(path, notes):
        if row is None or type(row.get("step")) is not int or row["step"] not in kept:
            continue
        layer, role = row.get("layer"), row.get("role")
        if isinstance(layer, str) and isinstance(role, str):
            tables.setdefault(row["step"], {})[layer, role] = row
    if not tables:
        return None
    steps = sorted(tables)
    keys = list(dict.fromkeys(key for step in steps for key in tables[step]))
    counts = {}
    for name in COUNTS:
        totals = np.array(
            [[_number(tables[step].get(key, {}).get(name), None) for key in keys] for step in steps]
        )
        before = np.vstack([np.zeros((1, len(keys))), totals[:-1]])
        part = totals - before
        counts[name] = np.where(part < 0, totals, part)  # counts began again at zero
    return LayerTables(np.array(steps, dtype=np.float64), keys, counts)


def _kept_tables(path: Path) -> set[int]:
    """Steps of the tables to read, found without parsing the lines."""
    steps: list[int] = []
    try:
        with path.open("rb") as file:
            for line in file:
                head = line[:40].partition(b",")[0].partition(b":")[2].strip()
                if head.isdigit() and (not steps or int(head) != steps[-1]):
                    steps.append(int(head))
    except OSError:
        return set()
    if len(steps) <= TABLES_KEPT:
        return set(steps)
    places = np.linspace(0, len(steps) - 1, TABLES_KEPT).round().astype(int)
    return {steps[place] for place in places}


def _read_attempts(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    lines = []
    for path in (folder / ATTEMPTS, *sorted(folder.glob(RANK_ATTEMPTS))):
        for _, line in _objects(path, notes):
            if line is None or line.get("event") not in (BEGUN, ENDED):
                continue
            moment = line.get("time")
            moment = moment if isinstance(moment, (int, float)) else 0.0
            lines.append({**line, "file": path.name, "time": moment})
    return sorted(lines, key=lambda line: line["time"])


def _saved_steps(folder: Path, notes: list[str]) -> list[int]:
    try:
        return steps_in(folder)
    except UserError as error:
        notes.append(str(error))
        return []


def _read_refusals(folder: Path, *, since: float) -> dict[str, str]:
    found = {}
    for path in sorted(folder.glob("refusal-*")):
        try:
            if path.is_file() and path.stat().st_mtime >= since:
                found[f"slurm/{path.name}"] = read_text(path, largest=LARGEST_REFUSAL).strip()
        except (OSError, UserError):  # removed meanwhile, or not a text: no line of a user error
            continue
    return {name: text for name, text in found.items() if text}


def _read_rollbacks(path: Path) -> list[str]:
    """The reasons in summary.json; a run that has not ended has none."""
    try:
        listed = read_json_object(path).get("rollbacks")
    except UserError:
        return []
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
