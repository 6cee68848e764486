"""Tables by layer: `overflow_layers.jsonl` and `speculation.jsonl` as grids of layers × steps.

Both have a line for each layer and step, which is a million lines after 100,000 steps. Only as many steps are
parsed as a picture has columns. For the counts of saturation this loses nothing: the lines have totals since
step 1, so the difference of two of them has everything that was counted between. For precisions, a column
shows one check and leaves others out; products below their threshold are counted in all lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalowbit.errors import file_system_error
from megalowbit.records.files import CHECKS, LAYERS
from megalowbit.records.lines import is_regular, note_damage, number_of, object_in

COLUMNS = 240  # steps of a grid
STEP = re.compile(rb'\{"step": ?(\d{1,15}),')
MISS = b'"is_hit": false'
COUNTS = ("elements", "saturated", "underflow", "nonfinite", "squared_error", "squared_norm")
ROLES = ("input", "weight", "grad_output")
Cells = NDArray[np.float64]


@dataclass(frozen=True)
class Sampled:
    """Lines of some steps of a file.

    Attributes:
        steps: those that are parsed, ascending.
        rows: of each of them, the objects.
        num_steps: steps in the file.
        misses: number of lines with `is_hit` false, over all steps.
    """

    steps: list[int]
    rows: list[list[dict[str, Any]]]
    num_steps: int
    misses: int


@dataclass(frozen=True)
class Grids:
    """Rates by layer and step.

    Attributes:
        layers: names, in the order of the file.
        columns: the step at the end of each column.
        cells: measure → role → (layers, columns); NaN: nothing was counted.
        nonfinite: elements that were inf or NaN, by layer and role, over the run; without zeros.
    """

    layers: list[str]
    columns: list[int]
    cells: Mapping[str, Mapping[str, Cells]]
    nonfinite: Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class Checks:
    """Precisions and SNRs of the products at the precision checks.

    Attributes:
        layers: names, in the order of the file.
        columns: the step of each column.
        candidates: names of the precisions, in the order in which they occur first.
        precision: product → (layers, columns), the number of the candidate; NaN: it did not run.
        measured: product → (layers, columns), in dB; NaN: not verified.
        misses: verified products below their threshold, over all checks.
        num_checks: in the file; of long runs, not each has a column.
    """

    layers: list[str]
    columns: list[int]
    candidates: list[str]
    precision: Mapping[str, Cells]
    measured: Mapping[str, Cells]
    misses: int
    num_checks: int


def read_sampled(
    path: Path, notes: list[str], names: tuple[str, ...], columns: int = COLUMNS
) -> Sampled | None:
    """Lines of at most about `columns` steps, evenly spaced, the first and the last included.

    Args:
        path: the file.
        notes: gets what is wrong with it.
        names: keys that each line must have, with texts; others are damaged.
        columns: number of steps.

    Returns:
        None if there is no file, or no step in it.

    Raises:
        UserError: it cannot be read.
    """
    try:
        if not is_regular(path, notes):
            return None
        places, damaged, misses = _byte_ranges(path, notes)
        steps = sorted(places)
        picked = steps
        if len(steps) > columns:
            picked = [steps[int(i)] for i in np.unique(np.round(np.linspace(0, len(steps) - 1, columns)))]
        rows = []
        with path.open("rb") as file:
            for step in picked:
                found, bad = _parsed(_lines_at(file, places[step]), step, names)
                rows.append(found)
                damaged += bad
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}): make it readable"
        raise file_system_error(message, error) from error
    note_damage(path, damaged, None, notes)
    return Sampled(picked, rows, len(steps), misses) if steps else None


def _byte_ranges(path: Path, notes: list[str]) -> tuple[dict[int, list[tuple[int, int]]], int, int]:
    """For each step, where its lines begin and end, in bytes; damaged lines; lines with a miss."""
    places: dict[int, list[tuple[int, int]]] = {}
    offset = damaged = misses = 0
    last = -1
    with path.open("rb") as file:
        for line in file:
            match = STEP.match(line)
            end = offset + len(line)
            row = object_in(line) if MISS in line else {}
            if not line.endswith(b"\n"):
                notes.append(f"{path.name} ends in the middle of a line, which is left out")
            elif match is None or row is None:
                damaged += 1
                last = -1
            else:
                step = int(match[1])
                misses += row.get("is_hit") is False
                if step == last:
                    places[step][-1] = (places[step][-1][0], end)
                else:
                    places.setdefault(step, []).append((offset, end))
                last = step
            offset = end
    return places, damaged, misses


def _lines_at(file: Any, spans: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    for start, end in spans:
        file.seek(start)
        yield from file.read(end - start).splitlines()


def _parsed(lines: Iterator[bytes], step: int, names: tuple[str, ...]) -> tuple[list[dict[str, Any]], int]:
    found, damaged = [], 0
    for line in lines:
        row = object_in(line)
        if row is None or row.get("step") != step or not all(isinstance(row.get(n), str) for n in names):
            damaged += 1
        else:
            found.append(row)
    return found, damaged


def read_grids(run: Path, notes: list[str]) -> Grids | None:
    """Saturation, underflow and SNR by layer, role and step; None if the run has no line of them.

    Damage is added to `notes`.

    Raises:
        UserError: the file cannot be read.
    """
    sampled = read_sampled(run / LAYERS, notes, ("layer", "role"))
    if sampled is None:
        return None
    totals = [
        {(row["layer"], row["role"]): _counts(row) for row in rows if row["role"] in ROLES}
        for rows in sampled.rows
    ]
    layers = list(dict.fromkeys(layer for each in totals for layer, _ in each))
    measures = {"saturation": _saturation, "underflow": _underflow, "snr": _snr}
    cells = {
        name: {role: np.full((len(layers), len(totals)), math.nan) for role in ROLES} for name in measures
    }
    number = {layer: row for row, layer in enumerate(layers)}
    earlier: dict[tuple[str, str], NDArray[np.float64]] = {}
    for column, table in enumerate(totals):
        for (layer, role), counts in table.items():
            before = earlier.get((layer, role))
            # totals that have fallen are those of a run that began to count again
            new = counts if before is None or (counts < before).any() else counts - before
            for name, measure in measures.items():
                cells[name][role][number[layer], column] = measure(new)
        earlier |= table
    nonfinite = {key: int(counts[3]) for key, counts in earlier.items() if counts[3] > 0}
    return Grids(layers, sampled.steps, cells, nonfinite) if layers else None


def read_checks(run: Path, notes: list[str]) -> Checks | None:
    """Precisions and measured SNRs by layer, product and step; None if the run has no line of them.

    Damage is added to `notes`.

    Raises:
        UserError: the file cannot be read.
    """
    sampled = read_sampled(run / CHECKS, notes, ("layer", "product", "precision"))
    if sampled is None:
        return None
    keyed = [{(row["layer"], row["product"]): row for row in rows} for rows in sampled.rows]
    layers = list(dict.fromkeys(layer for each in keyed for layer, _ in each))
    if not layers:
        return None
    products = list(dict.fromkeys(product for each in keyed for _, product in each))
    candidates = list(dict.fromkeys(row["precision"] for each in keyed for row in each.values()))
    shape = (len(layers), len(keyed))
    precision = {product: np.full(shape, math.nan) for product in products}
    measured = {product: np.full(shape, math.nan) for product in products}
    number = {layer: row for row, layer in enumerate(layers)}
    for column, table in enumerate(keyed):
        for (layer, product), row in table.items():
            precision[product][number[layer], column] = candidates.index(row["precision"])
            measured[product][number[layer], column] = _finite(row.get("measured_db"))
    columns, misses, num_checks = sampled.steps, sampled.misses, sampled.num_steps
    return Checks(layers, columns, candidates, precision, measured, misses, num_checks)


def _counts(row: Mapping[str, Any]) -> NDArray[np.float64]:
    return np.array([_finite(row.get(name)) for name in COUNTS])


def _finite(value: object) -> float:
    """A finite number; NaN for anything else."""
    number = number_of(value)
    return number if math.isfinite(number) else math.nan


def _saturation(counts: NDArray[np.float64]) -> float:
    return 100 * _ratio(counts[1], counts[0])


def _underflow(counts: NDArray[np.float64]) -> float:
    return 100 * _ratio(counts[2], counts[0])


def _snr(counts: NDArray[np.float64]) -> float:
    error, norm = counts[4], counts[5]
    return 10 * math.log10(norm / error) if error > 0 and norm > 0 else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
