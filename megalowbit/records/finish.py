"""Whether a run has finished, and after which step: one answer for the report and for diagnose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalowbit.records.files import DONE, object_if_any
from megalowbit.records.lines import step_in
from megalowbit.values import BLOCK


@dataclass(frozen=True)
class Finish:
    """What `DONE` says, held against the configuration and the records.

    Attributes:
        step: the step after which the run has finished, also if it was continued since; 0: it never has.
        is_final: it has finished, and was not continued with more steps.
    """

    step: int
    is_final: bool


def read_finish(folder: Path, config: Mapping[str, Any], last_step: int, notes: list[str]) -> Finish:
    """Read `DONE`; one that names no step is of the configured number of steps.

    Args:
        folder: the run folder.
        config: its resolved configuration; empty if it is not known.
        last_step: of metrics.jsonl.
        notes: gets a line if `DONE` is damaged.
    """
    path = folder / DONE
    if not path.exists():
        return Finish(0, is_final=False)
    planned = planned_steps(config)
    step = step_in(object_if_any(path, notes))
    if step is None:
        step = planned
    if step is None:  # nothing says how many steps there should be
        return Finish(0, is_final=True)
    return Finish(step, is_final=max(planned or 0, last_step) <= step)


def planned_steps(config: Mapping[str, Any]) -> int | None:
    """`run.steps`; None if the configuration does not say, or not a number of steps."""
    found: Any = config
    for key in (BLOCK, "run", "steps"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return step_in({"step": found})
