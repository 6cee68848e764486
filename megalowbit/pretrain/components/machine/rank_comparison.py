"""Which rank is the slowest in the forward pass, and which has the highest loss, in each step.

One slow device slows all ranks, because they wait for it in collectives: the time of a step is the same on
all of them. One device that computes wrongly disappears in the mean. Each rank therefore adds its own time
and loss to the reduction of the step's facts, in a place that only it fills. This adds 16 bytes a rank to one
all-reduce, and no host read. A run on one process does not have this component, nor does a pipeline, whose
stages have different work.

On GPUs, the time is that of the device, of the last forward passes that it has finished. Not covered: waiting
inside the forward pass (ZeRO 3, tensor parallelism), where all ranks of a group look equally slow, and slow
backward passes of a device that is fast in forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import TYPE_CHECKING

from megalowbit.pretrain.components.base import Component, RunParts
from megalowbit.telemetry.facts import Facts

if TYPE_CHECKING:
    import torch

FORWARD = "forward"


class RankComparison(Component):
    """Times and losses of single ranks.

    Args:
        rank: of this process.
        world_size: number of ranks.
        device: on which this rank computes.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        from megalowbit.optim.timers import StepTimers

        self._rank, self._size, self._device = rank, world_size, device
        self._timers = StepTimers(device)
        self._of_step: Facts = {}

    @classmethod
    def build(cls, settings: None, parts: RunParts) -> RankComparison | None:
        from megalowbit.distributed import process_group

        size = process_group.world_size()
        if size == 1 or parts.engine.process_grid.pipeline_size > 1:
            return None
        return cls(process_group.rank(), size, parts.engine.device)

    def forward(self) -> AbstractContextManager[None]:
        """The forward pass of a micro-batch."""
        return self._timers(FORWARD)

    def sums(self, loss: torch.Tensor) -> torch.Tensor:
        """(2 · ranks,) float64, to be summed over the ranks: their milliseconds, then their losses.

        Args:
            loss: 0-dim, of this rank.
        """
        import torch

        sums = torch.zeros(2 * self._size, dtype=torch.float64, device=self._device)
        sums[self._rank] = self._timers.milliseconds().get(FORWARD, math.nan)
        sums[self._size + self._rank] = loss.detach()
        return sums

    def note(self, sums: Sequence[float]) -> None:
        """Note the sums over all ranks, which the host has read."""
        times, losses = sums[: self._size], sums[self._size :]
        facts: dict[str, float | int] = {}
        if not any(map(math.isnan, times)):
            slowest = max(range(self._size), key=times.__getitem__)
            facts = {
                "ranks/slowest": slowest,
                "ranks/slowest_milliseconds": times[slowest],
                "ranks/other_milliseconds": _median_without(slowest, times),
            }
        highest = max(range(self._size), key=lambda rank: _or_infinite(losses[rank]))
        self._of_step = {
            **facts,
            "ranks/highest_loss_rank": highest,
            "ranks/highest_loss": losses[highest],
            "ranks/other_loss": _median_without(highest, losses),
        }

    def facts(self, known: Facts) -> Facts:
        return self._of_step


def _or_infinite(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _median_without(rank: int, values: Sequence[float]) -> float:
    """The median of the other ranks' values."""
    return median(value for each, value in enumerate(values) if each != rank)
