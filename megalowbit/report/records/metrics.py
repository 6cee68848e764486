"""`metrics.jsonl` as columns of numbers.

The file may be that of a running or killed run, so a line that is not complete or not JSON is left out and
counted. Values that JSON has no word for are null in it, with their names under `nonfinite`; here they are
NaN. A step that occurs twice keeps its last line.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalowbit.errors import UserError, file_system_error
from megalowbit.values import counted

METRICS = "metrics.jsonl"
LARGEST, SMALLEST = 1e60, 1e-60  # of figures
MOST_STEP = 2**53  # larger numbers are no steps of a run, and not exact as floats
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """A figure: the steps that have it, ascending, and its values; NaN where it was null or not finite."""

    steps: Numbers
    values: Numbers

    def finite(self) -> Column:
        """Without values that are not finite."""
        is_finite = np.isfinite(self.values)
        return Column(self.steps[is_finite], self.values[is_finite])

    @property
    def last(self) -> float | None:
        """The last finite value, or None."""
        values = self.finite().values
        return float(values[-1]) if len(values) else None

    def __bool__(self) -> bool:
        return bool(np.isfinite(self.values).any())


NOTHING = Column(np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Metrics:
    """The records of all steps.

    Attributes:
        steps: ascending.
        columns: name → figure, in the order of the file.
        texts: name → step → text, such as the tensor that overflowed.
        nonfinite: name → steps at which it was NaN or infinite, not merely unknown.
        notes: what is wrong with the file, in sentences.
    """

    steps: Numbers
    columns: dict[str, Column]
    texts: dict[str, dict[int, str]] = field(default_factory=dict)
    nonfinite: dict[str, Numbers] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def column(self, name: str) -> Column:
        """A figure; an empty one if no step has it."""
        return self.columns.get(name, NOTHING)

    @property
    def last_step(self) -> int:
        """The last recorded step."""
        return int(self.steps[-1])

    @property
    def skipped(self) -> Numbers:
        """The steps that were skipped."""
        total = self.column("skipped_steps").finite()
        return total.steps[np.flatnonzero(np.diff(total.values, prepend=0.0) > 0)]


class _Reader:
    """Collects the values of each name."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        self.texts: dict[str, dict[int, str]] = defaultdict(dict)
        self.nonfinite: dict[str, list[int]] = defaultdict(list)

    def add(self, record: dict[str, Any]) -> None:
        """Add a line; its step must be valid."""
        step = record["step"]
        self.steps.append(step)
        strange = record.get("nonfinite")
        if isinstance(strange, dict):
            for name in strange:
                self.nonfinite[name].append(step)
        for name, value in record.items():
            if isinstance(value, str):
                self.texts[name][step] = value
            elif value is None or isinstance(value, (int, float)):
                steps, values = self.values[name]
                steps.append(step)
                number = as_number(value)
                values.append(number)
                if value is not None and not math.isfinite(number):
                    self.nonfinite[name].append(step)


def read_metrics(path: Path) -> Metrics:
    """Read the file.

    Raises:
        UserError: it is missing, cannot be read, or has no step.
    """
    reader, damaged, is_torn = _Reader(), [], False
    try:
        if not path.is_file():
            what = "is no regular file" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}: name a run that has recorded a step, or wait for its first")
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    is_torn = True
                    break
                record = _record(line)
                if record is None:
                    damaged.append(number)
                else:
                    reader.add(record)
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}): make it readable"
        raise file_system_error(message, error) from error
    if not reader.steps:
        is_empty = not damaged and not is_torn
        why = "is empty" if is_empty else "has no complete line with a step"
        raise UserError(f"{path} {why}: wait for the run's first step, or name another run")
    return _metrics(reader, _notes(path.name, damaged, is_torn))


def _notes(name: str, damaged: list[int], is_torn: bool) -> list[str]:
    notes = []
    if damaged:
        lines = f"line {damaged[0]}" + (f" and {len(damaged) - 1:,} more" if len(damaged) > 1 else "")
        notes.append(f"{lines} of {name} {'is' if len(damaged) == 1 else 'are'} damaged and left out.")
    if is_torn:
        notes.append(f"The last line of {name} is not complete and left out.")
    return notes


def _metrics(reader: _Reader, notes: list[str]) -> Metrics:
    steps = np.array(reader.steps, dtype=np.float64)
    unique = np.unique(steps)
    if len(unique) < len(steps):
        notes.append(
            f"{counted(len(steps) - len(unique), 'step')} occurred twice; the last line of each counts."
        )
    first, last = int(unique[0]), int(unique[-1])
    missing = last - first + 1 - len(unique)
    if missing or first > 1:
        notes.append(f"{counted(missing + first - 1, 'step')} up to step {last:,} have no line.")
    return Metrics(
        steps=unique,
        columns={name: _column(*pair) for name, pair in reader.values.items() if name != "step"},
        texts=dict(reader.texts),
        nonfinite={
            name: np.unique(np.array(found, dtype=np.float64)) for name, found in reader.nonfinite.items()
        },
        notes=tuple(notes),
    )


def _column(steps: list[int], values: list[float]) -> Column:
    """Sorted by step; of equal steps the last one."""
    at, numbers = np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)
    if len(at) > 1 and not (np.diff(at) > 0).all():
        _, from_end = np.unique(at[::-1], return_index=True)
        kept = len(at) - 1 - from_end
        at, numbers = at[kept], numbers[kept]
    return Column(at, numbers)


def _record(line: bytes) -> dict[str, Any] | None:
    """The object in a line, if it has a step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < MOST_STEP else None


def as_number(value: object) -> float:
    """A number of a record; NaN for anything else.

    No figure of a run is near the ends of float64. Larger ones are infinite and smaller ones 0, so that their
    squares and ratios can be computed.
    """
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, (int, float)) or value != value:
        return math.nan
    if abs(value) > LARGEST:  # compared as an integer of hundreds of digits, if it is one
        return math.inf if value > 0 else -math.inf
    return float(value) if abs(value) >= SMALLEST else 0.0
