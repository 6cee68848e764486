"""`overflow_layers.jsonl` as counts between two tables, by layer and operand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megalowbit.findings.robust import Array
from megalowbit.records.lines import number_of
from megalowbit.records.tables import read_sampled

TABLES_KEPT = 200  # of a long run: evenly spread, and the last
COUNTS = (
    "elements", "saturated", "underflow", "nonfinite", "blocks", "saturated_scales", "zero_blocks",
    "quantizations", "nonfinite_quantizations", "squared_error", "squared_norm",
)  # fmt: skip


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


def read_layers(path: Path, notes: list[str]) -> LayerTables | None:
    """The tables; of a long run, `TABLES_KEPT` of them, which then count over longer intervals."""
    sampled = read_sampled(path, notes, ("layer", "role"), TABLES_KEPT)
    if sampled is None:
        return None
    tables = {
        step: {(row["layer"], row["role"]): row for row in rows}
        for step, rows in zip(sampled.steps, sampled.rows, strict=True)
    }
    steps = [step for step, table in tables.items() if table]
    if not steps:
        return None
    keys = list(dict.fromkeys(key for step in steps for key in tables[step]))
    totals = np.array(  # (tables, rows, counts)
        [
            [[number_of(tables[step].get(key, {}).get(name)) for name in COUNTS] for key in keys]
            for step in steps
        ]
    )
    part = np.diff(totals, axis=0, prepend=0.0)
    # if one total of a row has fallen, all of them began again at zero
    part = np.where((part < 0).any(axis=2, keepdims=True), totals, part)
    counts = {name: part[:, :, number] for number, name in enumerate(COUNTS)}
    return LayerTables(np.array(steps, dtype=np.float64), keys, counts)
