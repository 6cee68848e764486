"""Counts saturation and underflow of quantised operands by layer over a run (`telemetry.overflow`).

This component builds, resets and saves the tracker, and attaches it to the layers in the steps that are
counted (`telemetry.count_every`); in other steps they have no observer, and kernels do not count. The step's
number decides, so a run that is resumed counts the same steps as one that is not interrupted. The counts are
reduced together with the loss in one all-reduce, so the loop reads them with the step's facts, and the
recorder writes the per-layer table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalowbit.pretrain.components.base import Component, RunParts
from megalowbit.records.files import LAYERS

if TYPE_CHECKING:
    from torch import nn

    from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker


class OverflowCounts(Component):
    """Saturation and underflow counts of all low-bit layers.

    Args:
        tracker: receives the counts.
        model: the converted model; its layers have the tracker already.
        every: interval between counted steps, see `is_counted`.

    Attributes:
        tracker: as given.
        is_counting: whether the tracker observes the layers now.
    """

    key = "tracker"
    records = (LAYERS,)

    def __init__(self, tracker: GradientOverflowTracker, model: nn.Module, every: int = 1) -> None:
        self.tracker = tracker
        self.is_counting = True
        self._model, self._every = model, every

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
        return cls(tracker, parts.engine.module, parts.telemetry.count_every)

    def before_step(self, step: int) -> None:
        """Attach the tracker to the layers if the next step is counted; detach it otherwise."""
        from megalowbit.layers.conversion.convert import set_observer

        is_counting = is_counted(step + 1, self._every)
        if is_counting != self.is_counting:
            set_observer(self._model, self.tracker if is_counting else None)
        self.is_counting = is_counting

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
            # earlier versions counted every step
            self.tracker.load_state_dict({"counted_steps": step, **state})


def is_counted(step: int, every: int) -> bool:
    """Whether operands are counted in a step, which is counted from 1: the first step and each multiple."""
    return step == 1 or step % every == 0
