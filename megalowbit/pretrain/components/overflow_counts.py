"""Counts saturation and underflow of quantised operands by layer over the whole run (`telemetry.overflow`).

This component builds, resets and saves the tracker. The counts are reduced together with the loss in one
all-reduce, so the loop reads them with `reduce_step_facts`, and the recorder writes the per-layer table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalowbit.pretrain.components.base import Component, RunParts

if TYPE_CHECKING:
    from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker


class OverflowCounts(Component):
    """Saturation and underflow counts of all low-bit layers; `tracker` observes the layers."""

    key = "tracker"
    records = ("overflow_layers.jsonl",)

    def __init__(self, tracker: GradientOverflowTracker) -> None:
        self.tracker = tracker

    @classmethod
    def build(cls, settings: None, parts: RunParts) -> OverflowCounts | None:
        """Attach a tracker to the layers; None if nothing is quantised or counting is off."""
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
        """Drop counts since the last step, including those of an attempt that is repeated."""
        self.tracker.begin_step()

    def state_dict(self) -> dict[str, Any]:
        """Totals over all ranks; collective."""
        return self.tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        """Continue from `state`; start at zero if there is none."""
        self.tracker.reset()
        if state is not None:
            self.tracker.load_state_dict(dict(state))
