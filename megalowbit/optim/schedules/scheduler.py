"""The scheduler that writes a schedule's learning rates into an optimizer at each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megalowbit.errors import UserError, shown
from megalowbit.optim.schedules.factors import ScheduleSettings
from megalowbit.values import is_count


class LRScheduler:
    """Multiplies the learning rate of each parameter group by the schedule's factor.

    Call `step` after each applied step, but not after a skipped one; an engine does this. Create the
    scheduler before the optimizer's state is loaded: it multiplies the groups' learning rates at that moment.
    Load the scheduler's state after the optimizer's, or call `write_rates` when both are loaded.

    Args:
        optimizer: its groups have their full learning rates; they are set to those of the first step.
        schedule: returns the factor of each step.

    Attributes:
        max_lrs: the full learning rate of each group.
        num_steps: number of applied steps, which is also the index of the coming step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ScheduleSettings) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self.max_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._start(0)

    def step(self) -> None:
        """Advance to the next step."""
        self._start(self.num_steps + 1)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group at the coming step."""
        factor = self.schedule.factor(self.num_steps)
        return [rate * factor for rate in self.max_lrs]

    def state_dict(self) -> dict[str, Any]:
        """The schedule's type and the number of applied steps."""
        return {"type": self.schedule.type, "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue after a number of steps, with this schedule's learning rates.

        Raises:
            UserError: the state belongs to another schedule, or is damaged; then nothing has changed.
        """
        saved = state if isinstance(state, Mapping) else {}
        kind, steps = saved.get("type"), saved.get("num_steps")
        if kind != self.schedule.type:
            was = "another library's, or none" if kind is None else shown(kind)
            raise UserError(
                f"megalowbit.lr_schedule.type was {was} in the checkpoint and is {self.schedule.type!r} now: "
                "resume with the former schedule, or start a new run from its weights"
            )
        if steps is None or not is_count(steps, least=0):
            raise UserError(f"num_steps of the loaded schedule is {shown(steps)}: use an earlier checkpoint")
        self._start(steps)

    def write_rates(self) -> None:
        """Write the learning rates of the coming step; needed after the groups were loaded with others."""
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _start(self, step: int) -> None:
        self.num_steps = step
        self.write_rates()
