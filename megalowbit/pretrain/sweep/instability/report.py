"""The report on a study's stresses: `instability.json`, and tables in `instability.md`.

Limits of metrics come from the unstressed runs of the same size and recipe, over all texts and seeds, that
have not broken. A run's lead is the number of steps from the first alarm of a metric to the first step at
which the run was broken; an alarm at or after that step is no warning.

What `megalowbit diagnose` says about each run stands beside it: it should name a cause where a run broke, and
nothing where it did not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megalowbit.durable_files import atomic_file
from megalowbit.pretrain.sweep.instability.alarms import (
    METRICS,
    Alarm,
    Limit,
    Series,
    false_alarms,
    first_alarm,
    limit_of,
    series,
)
from megalowbit.pretrain.sweep.instability.breaks import Break, Judgement, Losses, judge
from megalowbit.pretrain.sweep.instability.tables import markdown
from megalowbit.pretrain.sweep.study.cells import Cell
from megalowbit.pretrain.sweep.study.results import LossMeans
from megalowbit.pretrain.sweep.study.study_file import StudySettings

FORMAT = 1
JSON_FILE, TEXT_FILE = "instability.json", "instability.md"
DIGITS = 6  # significant ones of a limit
Diagnose = Callable[[Path], Mapping[str, Any]]  # folder of a run → state, and name and step of what was first


@dataclass(frozen=True)
class StressedRun:
    """A finished cell of a size that is stressed, or that others are a stress of.

    Attributes:
        cell: the cell.
        losses: by step.
        baseline: losses of the baseline's cell of the same size, text, length and seed; None: this is it, or
            it is not finished.
        unstressed: losses of the cell without the stress; None: this is it, or it is not finished.
    """

    cell: Cell
    losses: Losses = field(repr=False)
    baseline: Losses | None = field(repr=False)
    unstressed: Losses | None = field(repr=False)

    @property
    def is_stressed(self) -> bool:
        """Whether it is under a stress."""
        return self.cell.size.stress_of is not None

    @property
    def key(self) -> tuple[str, str]:
        """The unstressed size and the recipe: runs with the same key share limits."""
        return (self.cell.size.stress_of or self.cell.size.name, self.cell.label)

    @cached_property
    def judgement(self) -> Judgement:
        """Whether and when it broke."""
        settings = self.cell.study.instability
        return judge(self.losses, self.baseline, steps=self.cell.steps, settings=settings)

    @property
    def cost(self) -> float:
        """Mean loss of the last window minus that of the unstressed run; NaN if one of them has none."""
        if self.unstressed is None:
            return math.nan
        settings = self.cell.study.instability
        other = judge(self.unstressed, None, steps=self.cell.steps, settings=settings)
        return self.judgement.end - other.end

    @property
    def first_break(self) -> Break | None:
        """The earliest break; None: it has not broken."""
        return self.judgement.breaks[0] if self.judgement.breaks else None

    @cached_property
    def series(self) -> dict[str, Series]:
        """The recorded metrics: column → medians."""
        rows, bucket = self.cell.run.rows(), self.cell.study.instability.bucket
        found = {metric.column: series(rows, metric, bucket) for metric in METRICS}
        return {column: values for column, values in found.items() if values}

    def alarms(self, limits: Mapping[str, Limit]) -> list[Alarm]:
        """The first alarm of each metric, earliest first."""
        in_a_row = self.cell.study.instability.in_a_row
        found = [
            first_alarm(self.series[column], limit, in_a_row)
            for column, limit in limits.items()
            if column in self.series
        ]
        return sorted((each for each in found if each is not None), key=lambda each: each.step)

    def to_dict(self, limits: Mapping[str, Limit], diagnose: Diagnose) -> dict[str, Any]:
        """Plain values, for JSON; `alarms` is null if the recipe has no unstressed run that is intact."""
        cell, judgement, first = self.cell, self.judgement, self.first_break
        alarms = [
            {**each.to_dict(), "lead": None if first is None else first.step - each.step}
            for each in self.alarms(limits)
        ]
        return {
            "cell": cell.name,
            "size": self.key[0],
            "stress": cell.size.name if self.is_stressed else None,
            "recipe": cell.label,
            "text": cell.text,
            "seed": cell.seed,
            "steps": cell.steps,
            "breaks": [each.to_dict() for each in judgement.breaks],
            "is_broken_at_end": judgement.is_broken_at_end,
            "end_loss": _finite(judgement.end),
            "gap": _finite(judgement.gap),
            "cost": _finite(self.cost),
            "metrics": sorted(self.series),
            "alarms": alarms if limits else None,
            "diagnosis": dict(diagnose(cell.path)),
        }


def write_instability(study: StudySettings, cells: Sequence[Cell], out: Path, diagnose: Diagnose) -> str:
    """Write the report on all finished cells under stress, and those to compare; returns the tables.

    Cells that were taken from kept results are counted only.

    Args:
        study: the study.
        cells: all its cells.
        out: folder of the study.
        diagnose: says what went wrong in a run, from the files in its folder.

    Raises:
        UserError: a result or a record of a cell is damaged.
    """
    runs = runs_of(cells)
    data = to_json(study, runs, diagnose)
    text = markdown(data)
    if left_out := sum(_is_kept(cell) for cell in _compared(cells)):
        text += f"\n\nLeft out, because kept results have no losses of single steps: {left_out} of the cells."
    for name, content in ((JSON_FILE, json.dumps(data, indent=1, allow_nan=False)), (TEXT_FILE, text)):
        with atomic_file(out / name) as file:
            file.write(content + "\n")
    return text


def runs_of(cells: Sequence[Cell]) -> list[StressedRun]:
    """The finished cells of stressed sizes and of those that they are a stress of, in the study's order."""
    finished = [
        (cell, result.losses)
        for cell in _compared(cells)
        if (result := cell.result()) is not None and not isinstance(result.losses, LossMeans)
    ]
    losses = {_place(cell, cell.size.name, cell.label): of for cell, of in finished}
    return [
        StressedRun(
            cell,
            of,
            None
            if cell.label == cell.study.baseline
            else losses.get(_place(cell, cell.size.name, cell.study.baseline)),
            None
            if cell.size.stress_of is None
            else losses.get(_place(cell, cell.size.stress_of, cell.label)),
        )
        for cell, of in finished
    ]


def _compared(cells: Sequence[Cell]) -> list[Cell]:
    stressed = {cell.size.stress_of for cell in cells}
    return [cell for cell in cells if cell.size.stress_of is not None or cell.size.name in stressed]


def _is_kept(cell: Cell) -> bool:
    result = cell.result()
    return result is not None and isinstance(result.losses, LossMeans)


def to_json(study: StudySettings, runs: Sequence[StressedRun], diagnose: Diagnose) -> dict[str, Any]:
    """All data of the report."""
    calibration: dict[tuple[str, str], list[StressedRun]] = {}
    for run in runs:
        if not run.is_stressed and run.first_break is None:
            calibration.setdefault(run.key, []).append(run)
    limits = {key: _limits(study, unstressed) for key, unstressed in calibration.items()}
    by_size: dict[str, dict[str, Any]] = {}
    for (size, recipe), found in limits.items():
        rounded = {column: _rounded(limit.to_dict()) for column, limit in found.items()}
        by_size.setdefault(size, {})[recipe] = rounded
    described = [run.to_dict(limits.get(run.key, {}), diagnose) for run in runs]
    return {
        "format": FORMAT,
        "settings": study.instability.model_dump(),
        "baseline": study.baseline,
        "limits": by_size,
        "runs": described,
        "metrics": [_record_of(study, metric.column, described, calibration) for metric in METRICS],
    }


def _place(cell: Cell, size: str, label: str) -> tuple[str, str, str, int, int]:
    """Where the cell with another size or recipe is in the grid."""
    return size, label, cell.text, cell.steps, cell.seed


def _limits(study: StudySettings, unstressed: Sequence[StressedRun]) -> dict[str, Limit]:
    found = {}
    for metric in METRICS:
        values = [run.series[metric.column] for run in unstressed if metric.column in run.series]
        limit = limit_of(metric, values, study.instability.margin)
        if limit is not None:
            found[metric.column] = limit
    return found


def _record_of(
    study: StudySettings,
    column: str,
    runs: Sequence[Mapping[str, Any]],
    calibration: Mapping[tuple[str, str], Sequence[StressedRun]],
) -> dict[str, Any]:
    """How well a metric has warned: over stressed runs that have recorded it, and over unstressed ones."""
    metric = next(each for each in METRICS if each.column == column)
    judged = [run for run in runs if run["stress"] and column in run["metrics"] and run["alarms"] is not None]
    broken = [run for run in judged if run["breaks"]]
    leads = [each["lead"] for run in broken for each in run["alarms"] if each["metric"] == column]
    early = sorted(lead for lead in leads if lead > 0)
    intact = [run for run in judged if not run["breaks"]]
    counts = []
    for unstressed in calibration.values():
        values = [run.series[column] for run in unstressed if column in run.series]
        number = false_alarms(metric, values, study.instability)
        if number is not None:
            counts.append((number, len(values)))
    return {
        "metric": column,
        "broken": len(broken),
        "warned": len(early),
        "leads": early,
        "intact": len(intact),
        "alarms_without_break": sum(
            any(each["metric"] == column for each in run["alarms"]) for run in intact
        ),
        "unstressed": sum(total for _, total in counts),
        "false_alarms": sum(number for number, _ in counts),
    }


def _rounded(limit: Mapping[str, Any]) -> dict[str, Any]:
    return {**limit, "values": [float(f"{value:.{DIGITS}g}") for value in limit["values"]]}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
