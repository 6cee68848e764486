"""`metrics.jsonl` as columns of numbers.

The file may be that of a running or killed run: a line that is not complete or not JSON is left out and
noted. Values that JSON has no word for are null in it, with their names under `nonfinite`. Of a step that
occurs twice, the last line counts.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalowbit.records.files import METRICS
from megalowbit.records.lines import LARGEST, SMALLEST, note_damage, number_of, objects, step_in
from megalowbit.values import counted

# figures that count or name a rank
WHOLE = frozenset({
    "skipped_steps", "skipped/rank", "skipped/ranks", "skipped/tensors", "rollbacks", "ranks/slowest",
    "ranks/highest_loss_rank",
})  # fmt: skip
MOST_WHOLE = 2**31
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """A figure: the steps that have it, ascending, and its values; NaN where it was null."""

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
        steps: (n,) ascending; empty if nothing could be read.
        columns: name → figure, in the order of the file.
        texts: name → step → text, such as the tensor that overflowed.
        nonfinite: name → steps at which it was NaN or infinite, not merely unknown.
        notes: what is wrong with the file.
    """

    steps: Numbers
    columns: dict[str, Column]
    texts: dict[str, dict[int, str]] = field(default_factory=dict)
    nonfinite: dict[str, Numbers] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> Column:
        """A figure; an empty one if no step has it."""
        return self.columns.get(name, NOTHING)

    def __getitem__(self, name: str) -> Numbers:
        """(n,) the figure at each of `steps`; NaN where a step does not have it."""
        known = self.column(name)
        if len(known.steps) == len(self.steps):
            return known.values
        found = np.full(len(self.steps), np.nan)
        found[np.searchsorted(self.steps, known.steps)] = known.values
        return found

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 if there is none."""
        return int(self.steps[-1]) if len(self.steps) else 0

    @cached_property
    def skipped(self) -> Numbers:
        """The steps that were skipped; of a run whose first steps have no line, those since then."""
        total = self.column("skipped_steps").finite()
        before = total.values[:1] if len(total.steps) and total.steps[0] > 1 else 0.0
        return total.steps[np.diff(total.values, prepend=before) > 0]

    @cached_property
    def is_skipped(self) -> NDArray[np.bool_]:
        """(n,) whether the update of each of `steps` was left out."""
        return np.isin(self.steps, self.skipped)


class _Reader:
    """Collects the values of each name, with the numbers of their rows."""

    def __init__(self, without: tuple[str, ...]) -> None:
        self.without = without
        self.steps: list[int] = []
        self.values: dict[str, tuple[array[int], array[float]]] = defaultdict(
            lambda: (array("q"), array("d"))
        )
        self.texts: dict[str, dict[int, str]] = defaultdict(dict)
        self.nonfinite: dict[str, array[int]] = defaultdict(lambda: array("q"))

    def add(self, step: int, record: dict[str, Any]) -> None:
        row = len(self.steps)
        self.steps.append(step)
        strange = record.get("nonfinite")
        strange = strange if isinstance(strange, dict) else {}
        without = self.without
        for name, value in record.items():
            if without and name.startswith(without):
                continue
            if type(value) is not float or not SMALLEST <= abs(value) <= LARGEST:  # most need no check
                if isinstance(value, str):
                    self.texts[name][row] = value
                if not (value is None or isinstance(value, (int, float))):
                    continue
                is_unknown = value is None and name not in strange
                value = number_of(value, strange.get(name))
                if not is_unknown and not math.isfinite(value):
                    self.nonfinite[name].append(row)
            rows, values = self.values[name]
            rows.append(row)
            values.append(value)

    def metrics(self, notes: list[str]) -> Metrics:
        lines = np.array(self.steps, dtype=np.float64)
        steps, from_end = np.unique(lines[::-1], return_index=True)
        place = np.full(len(lines), -1)  # of each row in `steps`; -1: a later line of its step counts
        place[len(lines) - 1 - from_end] = np.arange(len(steps))
        if len(steps) < len(lines):
            repeated = counted(len(lines) - len(steps), "step")
            notes.append(f"{METRICS}: {repeated} occurred twice; the last line of each counts")
        if len(steps) and (missing := int(steps[-1]) - len(steps) + int(steps[0] == 0)):
            notes.append(f"{METRICS}: {counted(missing, 'step')} up to step {int(steps[-1]):,} have no line")

        def at(rows: array[int]) -> tuple[NDArray[np.intp], Numbers]:
            """Of rows that count, by step: places in `rows`, and steps."""
            places = place[np.asarray(rows)]
            order = np.argsort(places, kind="stable")[np.count_nonzero(places < 0) :]
            return order, steps[places[order]]

        columns = {}
        for name, (rows, values) in self.values.items():
            order, of_rows = at(rows)
            columns[name] = Column(of_rows, np.asarray(values)[order])
            if name in WHOLE:
                found = columns[name].values
                found[~((found >= 0) & (found < MOST_WHOLE))] = np.nan
        texts = {
            name: {int(steps[place[row]]): text for row, text in found.items() if place[row] >= 0}
            for name, found in self.texts.items()
        }
        nonfinite = {name: at(rows)[1] for name, rows in self.nonfinite.items()}
        nonfinite = {name: found for name, found in nonfinite.items() if len(found)}
        return Metrics(steps, columns, texts, nonfinite, tuple(notes))


def read_metrics(path: Path, *, without: tuple[str, ...] = ()) -> Metrics:
    """Read the file; one that is missing or has no step is a note, and there are no steps.

    Args:
        path: the file.
        without: figures whose names begin with one of these are not kept, which saves time.

    Raises:
        UserError: it cannot be read.
    """
    reader = _Reader(without)
    notes: list[str] = []
    damaged: list[int] = []
    for number, record in objects(path, notes):
        step = step_in(record)
        if record is None or step is None:
            damaged.append(number)
        else:
            del record["step"]
            reader.add(step, record)
    note_damage(path, len(damaged), damaged[0] if damaged else None, notes)
    if not path.exists():
        notes.append(f"{path.name} is missing, so no step is known")
    elif not reader.steps and not notes:
        notes.append(f"{path.name} is empty")
    return reader.metrics(notes)
