"""What a finding is: a cause or a symptom, its first step, the evidence and what to do.

Each file of this folder has findings of one subject and reads only `RunFiles`. `diagnosis_of` in `verdict`
puts them into order. A finding never claims more than its evidence: `is_shown` is for what the records prove,
and everything else is called likely. What cannot be decided is a symptom, whose cause is "not known".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["cause", "symptom", "ending"]

# Names of findings; stable, they are in --json.
RATE, NO_LEARNING, LAYER, DATA = "learning rate", "no learning", "layer", "data"
GRADIENTS, LOSS = "non-finite gradients", "non-finite loss"
ROSE, JUMPED = "loss rose", "loss jumped"
SLOW_RANK, REPLICAS = "slow rank", "replicas differ"
LOST_RANK, KILLED, HANG, NETWORK = "lost rank", "killed", "hang", "network"
LAUNCHER = "launcher lost"
MEMORY, DISK, DEFECT, REFUSED, TRANSIENT = (
    "out of memory", "disk full", "error", "user error", "transient error",
)  # fmt: skip
STOPPED, INTERRUPTED, OVERDUE, FOLDER = "stopped", "interrupted", "killed at the limit", "folder deleted"
GUARD, CHECKPOINT, UNFINISHED = "stopped by the loss", "damaged checkpoint", "unfinished"
RECORDS = "records missing or damaged"

# What a cause may lead to. A later finding of these names is called its consequence.
_NUMBERS = frozenset({GRADIENTS, LOSS, ROSE, JUMPED, LAYER, GUARD, RATE, NO_LEARNING})
CONSEQUENCES: Mapping[str, frozenset[str]] = {
    RATE: _NUMBERS,
    LAYER: _NUMBERS | {REPLICAS},
    DATA: _NUMBERS,
    GRADIENTS: _NUMBERS,
    LOSS: _NUMBERS,
    REPLICAS: _NUMBERS,
    ROSE: _NUMBERS,
    JUMPED: _NUMBERS,
    DISK: frozenset({CHECKPOINT, LOST_RANK}),
    MEMORY: frozenset({LOST_RANK, KILLED}),
    SLOW_RANK: frozenset({HANG}),
}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One recorded fact.

    Attributes:
        file: in the run folder.
        text: what it says there, with the value.
        step: of the fact; None: it belongs to no step.
    """

    file: str
    text: str
    step: int | None = None

    def __str__(self) -> str:
        where = self.file if self.step is None else f"{self.file}, step {self.step}"
        return f"{where}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that went wrong.

    Attributes:
        name: one of the names above.
        step: the first step at which it shows; None: it belongs to no step.
        title: one sentence.
        evidence: in the order of its steps.
        remedy: what to do, the best first; `--set …` where a setting exists.
        role: "cause": it explains others; "symptom": its cause is not known from it alone; "ending": how the
            last attempt ended.
        is_shown: the records prove it; otherwise it is the most likely explanation.
        is_failure: an "ending" that needs no repair, such as a stop on request, is none.
    """

    name: str
    step: int | None
    title: str
    evidence: tuple[Evidence, ...]
    remedy: tuple[str, ...] = ()
    role: Role = "cause"
    is_shown: bool = True
    is_failure: bool = True

    def may_cause(self, other: Finding) -> bool:
        """Whether `other`, which is not earlier, may be a consequence of this one."""
        return self.role != "ending" and other.name in CONSEQUENCES.get(self.name, frozenset())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "step": self.step,
            "title": self.title,
            "role": self.role,
            "certainty": "shown" if self.is_shown else "likely",
            "evidence": [{"file": e.file, "step": e.step, "text": e.text} for e in self.evidence],
            "remedy": list(self.remedy),
        }
