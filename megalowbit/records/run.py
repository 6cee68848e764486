"""A run folder, read for a report. Nothing in it is changed, and the run may still write to it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object
from megalowbit.records.attempts import BEGUN, read_attempts
from megalowbit.records.files import CONFIG, METRICS, SUMMARY, object_if_any
from megalowbit.records.finish import planned_steps, read_finish
from megalowbit.records.metrics import Metrics, read_metrics
from megalowbit.records.tables import Checks, Grids, read_checks, read_grids
from megalowbit.values import BLOCK


@dataclass(frozen=True)
class RunRecords:
    """The files of a run.

    Attributes:
        folder: the run folder.
        label: its name on the page, different from those of the other runs.
        config: the resolved configuration.
        attempts: the starts of its processes.
        metrics: the records of its steps.
        grids: saturation, underflow and SNR by layer; None: there are none.
        checks: the precision checks; None: there are none.
        finished: the step after which it has finished; None: it has not, or was continued with more steps.
        is_trained: whether all steps were trained and summarised; the export and `DONE` follow.
        age: seconds since its last record.
        notes: what could not be read, of all files.
    """

    folder: Path
    label: str
    config: Mapping[str, Any]
    attempts: Sequence[Mapping[str, Any]]
    metrics: Metrics
    grids: Grids | None
    checks: Checks | None
    finished: int | None
    is_trained: bool
    age: float
    notes: Sequence[str]

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted key; `default` where there is none."""
        value: Any = self.config
        for name in key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                return default
            value = value[name]
        return value

    @property
    def steps(self) -> int | None:
        """The number of steps that the run is configured for."""
        return planned_steps(self.config)

    @property
    def recipe(self) -> str:
        """The name of its recipe; of one with changed fields, that of its base and an ellipsis."""
        recipe = self.setting(f"{BLOCK}.recipe")
        if isinstance(recipe, Mapping):
            return f"{recipe.get('base', 'recipe')} …"
        return str(recipe) if recipe else "?"

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of an optimizer step, over all ranks, of the last recorded step."""
        tokens = self.metrics.column("tokens").finite()
        return float(tokens.values[-1] / tokens.steps[-1]) if len(tokens.steps) and tokens.steps[-1] else None

    @property
    def state(self) -> str:
        """`finished`; `trained`, as in the page that the run itself writes; or how far it is."""
        last = self.metrics.last_step
        if self.finished is not None:
            return f"finished after {self.finished:,} steps"
        if self.is_trained:
            return f"trained for all {last:,} steps"
        of = f" of {self.steps:,}" if self.steps else ""
        return f"not finished: step {last:,}{of}, last record {duration_text(self.age)} before this page"


def read_runs(folders: Sequence[Path]) -> list[RunRecords]:
    """Read the run folders, which must differ.

    Raises:
        UserError: one is no run folder, has no recorded step, is damaged, or is named twice.
    """
    resolved = [folder.resolve() for folder in folders]
    for number, folder in enumerate(resolved):
        if folder in resolved[:number]:
            raise UserError(f"{folders[number]} is named twice: name each run once")
    return [_read(folder, label) for folder, label in zip(folders, labels(resolved), strict=True)]


def _read(folder: Path, label: str) -> RunRecords:
    if not folder.is_dir():
        raise UserError(
            f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}: name a run folder"
        )
    config = folder / CONFIG
    if not config.is_file():
        raise UserError(f"{folder} is not a run folder (no {CONFIG}): name the folder of a run")
    content = read_json_object(config)
    if not isinstance(content.get(BLOCK), Mapping):
        raise UserError(f"{config} has no {BLOCK} block, so {folder} is not a run folder: name that of a run")
    metrics = read_metrics(folder / METRICS)
    if not len(metrics):
        why = "; ".join(metrics.notes)
        raise UserError(f"{folder} has no step ({why}): wait for the run's first step, or name another run")
    notes = list(metrics.notes)
    finish = read_finish(folder, content, metrics.last_step, notes)
    summary = object_if_any(folder / SUMMARY, notes)
    return RunRecords(
        folder=folder,
        label=label,
        config=content,
        attempts=[line for line in read_attempts(folder, notes) if line["event"] == BEGUN],
        metrics=metrics,
        grids=read_grids(folder, notes),
        checks=read_checks(folder, notes),
        finished=(finish.step or metrics.last_step) if finish.is_final else None,
        is_trained=summary.get("steps") == planned_steps(content) == metrics.last_step,
        age=max(0.0, time.time() - (folder / METRICS).stat().st_mtime),
        notes=notes,
    )


def labels(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths: as few of them as tell the folders apart."""
    for parts in range(1, max((len(each.parts) for each in folders), default=1) + 1):
        found = ["/".join(each.parts[-parts:]) for each in folders]
        if len(set(found)) == len(found):
            return found
    return [str(each) for each in folders]


def duration_text(seconds: float) -> str:
    """`12 s`, `5 min`, `3.2 h` or `2.1 days`."""
    for size, unit in ((86400, "days"), (3600, "h")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
