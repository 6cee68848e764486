"""Overflow of quantised operands, counted by layer over the whole run (`telemetry.overflow`).

Its figures ride with the loss in one all-reduce, so the loop reads them with `reduce_step_facts` and the
recorder writes the table by layer; here is what a run needs around the tracker.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalowbit.pretrain.components.base import Component, RunParts

if TYPE_CHECKING:
    from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker


class OverflowCounts(Component):
    """Counts of all low-bit layers; `tracker` is their observer."""

    key = "tracker"
    records = ("overflow_layers.jsonl",)

    def __init__(self, tracker: GradientOverflowTracker) -> None:
        self.tracker = tracker

    @classmethod
    def build(cls, settings: None, parts: RunParts) -> OverflowCounts | None:
        """With the layers observed; None where nothing is quantised, or counted."""
        from megalowbit.engine.pipeline.setup import groups_of
        from megalowbit.layers.conversion.convert import set_observer
        from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker

        if not (parts.telemetry.overflow and parts.num_layers):
            return None
        groups = groups_of(parts.engine.module)
        tracker = GradientOverflowTracker(stages=None if groups is None else groups.pipeline)
        set_observer(parts.engine.module, tracker)
        return cls(tracker)

    def begin_attempt(self) -> None:
        """Drop what was seen since the last step, and what a try that is repeated has counted."""
        self.tracker.begin_step()

    def state_dict(self) -> dict[str, Any]:
        """Totals over all ranks; collective."""
        return self.tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        """Continue from `state`; from nothing where there is none."""
        self.tracker.reset()
        if state is not None:
            self.tracker.load_state_dict(dict(state))
