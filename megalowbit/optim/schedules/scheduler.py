"""What writes a schedule's learning rates into an optimizer, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megalowbit.errors import UserError, shown
from megalowbit.optim.schedules.factors import ScheduleSettings
from megalowbit.values import is_count


class LRScheduler:
    """Multiplies the learning rate of each parameter group by the schedule's factor.

    Call `step` after each step that was applied, and not after one that was skipped; an engine does. Make it
    before the optimizer's state is loaded: the groups' rates at that moment are those that are multiplied.
    Load its own state after the optimizer's, or call `write_rates` when both are loaded.

    Args:
        optimizer: whose groups have their full rates now; they get those of the first step.
        schedule: which factor each step has.

    Attributes:
        max_lrs: of each group, its full rate.
        num_steps: applied steps so far; the number of the coming one, from 0.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ScheduleSettings) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self.max_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._start(0)

    def step(self) -> None:
        """Go on to the next step."""
        self._start(self.num_steps + 1)

    def get_last_lr(self) -> list[float]:
        """Of each group, the rate of the coming step."""
        factor = self.schedule.factor(self.num_steps)
        return [rate * factor for rate in self.max_lrs]

    def state_dict(self) -> dict[str, Any]:
        """The schedule's type and the number of applied steps."""
        return {"type": self.schedule.type, "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue after a number of steps, with the rates that this schedule gives to them.

        Raises:
            UserError: the state is that of another schedule, or damaged; nothing has changed then.
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
        """Write the rates of the coming step; needed after the groups were loaded with other rates."""
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _start(self, step: int) -> None:
        self.num_steps = step
        self.write_rates()
