"""`metrics.jsonl` as columns of numbers; of a long run, only those that findings use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megalowbit.findings.lines import number_of, objects, step_in
from megalowbit.findings.robust import Array
from megalowbit.values import counted

NUMBERS = (
    "loss", "lr", "grad_norm", "loss_scale", "skipped_steps", "skipped/rank", "skipped/ranks",
    "skipped/tensors", "tokens_per_second", "rollbacks", "validation/loss", "ranks/slowest",
    "ranks/slowest_milliseconds", "ranks/other_milliseconds", "ranks/highest_loss_rank", "ranks/highest_loss",
    "ranks/other_loss",
)  # fmt: skip

# of them, those that count or name a rank
WHOLE = (
    "skipped_steps", "skipped/rank", "skipped/ranks", "skipped/tensors", "rollbacks", "ranks/slowest",
    "ranks/highest_loss_rank",
)  # fmt: skip
MOST_WHOLE = 2**31


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


def read_metrics(path: Path, notes: list[str]) -> Metrics:
    """Read the file; of a step that occurs twice, the last line counts, as in the report.

    Raises:
        UserError: it cannot be read.
    """
    steps: list[int] = []
    values: dict[str, list[float]] = {name: [] for name in NUMBERS}
    tensors: list[str | None] = []
    num_damaged, first_damaged = 0, None
    for number, row in objects(path, notes):
        step = step_in(row)
        if row is None or step is None:
            num_damaged, first_damaged = num_damaged + 1, first_damaged or number
            continue
        for name in row:
            if name.startswith("loss/") and name not in values:
                values[name] = [math.nan] * len(steps)
        steps.append(step)
        infinite = row.get("nonfinite")
        infinite = infinite if isinstance(infinite, dict) else {}
        for name, column in values.items():
            column.append(number_of(row.get(name), infinite.get(name)))
        tensor = row.get("skipped/tensor")
        tensors.append(tensor if isinstance(tensor, str) else None)
    if not path.exists():
        notes.append(f"{path.name} is missing: no step is known")
    elif num_damaged:
        notes.append(f"{path.name}: {num_damaged} damaged lines are left out, the first is {first_damaged}")
    unique, from_end = np.unique(np.array(steps, dtype=np.float64)[::-1], return_index=True)
    kept = len(steps) - 1 - from_end
    if len(kept) < len(steps):
        repeated = counted(len(steps) - len(kept), "step")
        notes.append(f"{path.name}: {repeated} occurred twice; the last line of each counts")
    columns = {name: np.array(column, dtype=np.float64)[kept] for name, column in values.items()}
    for name in WHOLE:
        columns[name][~((columns[name] >= 0) & (columns[name] < MOST_WHOLE))] = np.nan
    return Metrics(unique, columns, [tensors[row] for row in kept], num_damaged, first_damaged)
