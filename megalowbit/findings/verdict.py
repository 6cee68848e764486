"""Puts a run's findings into order: what came first, what followed from it, and what is not known.

The first cause is the cause with the lowest step; a slow rank that has only cost time comes last. Later
findings that the first may lead to (`base.CONSEQUENCES`) are its consequences; others stand beside it. A
symptom before every cause has none: the diagnosis then says "not known", and what to record next time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalowbit.findings import endings, gradients, layers, losses, ranks, records
from megalowbit.findings.base import SLOW_RANK, Finding
from megalowbit.findings.run_files import RunFiles
from megalowbit.values import counted

HEALTHY, RUNNING, STOPPED, TROUBLED = "healthy", "running", "stopped", "troubled"


@dataclass(frozen=True)
class Verdict:
    """The diagnosis of a run.

    Attributes:
        state: HEALTHY, RUNNING (and nothing is wrong so far), STOPPED (on request) or TROUBLED.
        first: the first finding, a cause or a symptom whose cause is not known; None: there is none.
        consequences: findings that `first` may have led to, by step.
        others: the remaining findings, by step.
        steps: last recorded step, and the planned number if it is known.
        notes: what could not be read.
    """

    state: str
    first: Finding | None
    consequences: tuple[Finding, ...]
    others: tuple[Finding, ...]
    steps: tuple[int, int | None]
    notes: tuple[str, ...]

    @property
    def is_cause_known(self) -> bool:
        """Whether the first finding explains itself."""
        return self.first is not None and self.first.role == "cause"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "state": self.state,
            "last_step": self.steps[0],
            "planned_steps": self.steps[1],
            "first": None if self.first is None else self.first.to_dict(),
            "is_cause_known": self.is_cause_known,
            "consequences": [finding.to_dict() for finding in self.consequences],
            "others": [finding.to_dict() for finding in self.others],
            "notes": list(self.notes),
        }


def diagnosis_of(run: RunFiles) -> Verdict:
    """Diagnose a run."""
    found = [*layers.findings(run), *ranks.findings(run), *gradients.findings(run), *endings.findings(run)]
    found += records.findings(run)
    found += losses.findings(run, known=found)
    return _ordered(run, found)


def _ordered(run: RunFiles, found: list[Finding]) -> Verdict:
    """Order findings; of the same step, causes come before symptoms and endings."""
    roles = {"cause": 0, "symptom": 1, "ending": 2}

    def place(finding: Finding) -> tuple[bool, float, int]:
        costs_only_time = finding.name == SLOW_RANK and not any(map(finding.may_cause, found))
        return costs_only_time, math.inf if finding.step is None else finding.step, roles[finding.role]

    failures = sorted((finding for finding in found if finding.is_failure), key=place)
    requests = [finding for finding in found if not finding.is_failure]
    steps, notes = (run.last_step, run.planned_steps), (*run.notes, *endings.notes(run), *_rollbacks(run))
    if not failures:
        state = STOPPED if requests else RUNNING if run.is_running else HEALTHY
        return Verdict(state, requests[0] if requests else None, (), (), steps, notes)
    first = failures[0]
    for finding in failures[1:]:
        # a cause that is seen one table later than its symptom may still be the first
        if first.role == "symptom" and finding.role == "cause" and finding.may_cause(first):
            if (finding.step or 0) <= (first.step or 0):
                first = finding
            break
    rest = [finding for finding in failures if finding is not first]
    consequences = tuple(finding for finding in rest if first.may_cause(finding))
    others = tuple(finding for finding in (*rest, *requests) if finding not in consequences)
    return Verdict(TROUBLED, first, consequences, others, steps, notes)


def _rollbacks(run: RunFiles) -> list[str]:
    """A note if the loss guard has removed the lines of bad steps."""
    counts = run.metrics["rollbacks"]
    count = max(len(run.rollbacks), int(np.nanmax(counts)) if np.isfinite(counts).any() else 0)
    if not count:
        return []
    why = f": {'; '.join(run.rollbacks)}" if run.rollbacks else "; the log of the run has the reasons"
    return [f"the loss guard has rolled back {counted(count, 'time')}, and those steps are in no record{why}"]
