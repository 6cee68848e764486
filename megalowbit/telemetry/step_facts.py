"""Combines the facts of a training step over ranks: one all-reduce, and at most one host read.

The loss needs an all-reduce anyway, and the overflow headline is part of the same one. It sums eight float64
numbers: loss·weight, weight, and six of the tracker. Numbers of a caller follow (`sums`): times and losses of
single ranks, losses of data sources. Telemetry communicates nothing else during a step. `PendingFacts` leaves
the host read to a caller that reads other numbers too. A rank that was asked to stop (by a signal or a time
limit) adds a large number to a count, so all ranks stop after the same step without additional bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalowbit.distributed import collectives, process_group
from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker, StepOverflow

# larger than any number of quantisations in a step; times 2^15 ranks, still exact in a float64
STOP_UNIT = 2.0**38


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The facts of one step, combined over all ranks.

    Attributes:
        loss: weighted mean over the ranks; NaN or inf if any rank's is.
        overflow: counts of this step; `None` if nothing is tracked.
        regularization: the regulariser's value on this rank; `None` without one.
        is_stop_asked: whether any rank was asked to stop.
        sums: further numbers, each summed over the ranks.
    """

    loss: float
    overflow: StepOverflow | None
    regularization: float | None = None
    is_stop_asked: bool = False
    sums: tuple[float, ...] = ()

    def facts(self) -> dict[str, float | int | None]:
        """Flat facts for the sinks."""
        facts: dict[str, float | int | None] = {"loss": self.loss}
        if self.regularization is not None:
            facts["regularization"] = self.regularization
        return {**facts, **(self.overflow.facts() if self.overflow else {})}


class PendingFacts:
    """The facts of a step, reduced over the ranks but still on the device.

    Whoever reads the device next can read `numbers` together with its own, so that the step has one host
    read. Every rank of `group` must create one. The arguments are those of `reduce_step_facts`,
    and `sums`: (n,) numbers to be summed over the ranks in the same reduction.

    Attributes:
        numbers: (n,) float64, on the loss's device or on that of the group's exchanges.
    """

    def __init__(
        self,
        loss: Tensor,
        *,
        weight: float = 1.0,
        tracker: GradientOverflowTracker | None = None,
        regularization: Tensor | None = None,
        is_stop_asked: bool = False,
        sums: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if tracker is not None and tracker.group is not group:
            raise ValueError("tracker counts over another group than the loss: pass the tracker's own group")
        if not weight >= 0:
            raise ValueError(f"weight must not be negative: {weight}")
        self._tracker, self._is_regularized = tracker, regularization is not None
        mean = loss.detach().double()
        counts = mean.new_zeros(1) if tracker is None else tracker.pack_step().to(mean.device)  # (1,) or (6,)
        counts[-1] += STOP_UNIT * is_stop_asked
        packet = torch.cat(
            [torch.stack([mean * weight, torch.full_like(mean, weight)]), counts]  # (3,) or (8,)
        )
        self._num_facts = len(packet)
        if sums is not None:
            packet = torch.cat([packet, sums.double()])
        local = [] if regularization is None else [regularization.detach().double().reshape(1)]
        if tracker is not None:
            local.append(tracker.pack_local_step())
        if process_group.world_size(group) > 1:
            packet = packet.to(process_group.exchange_device(group, packet.device))
            collectives.all_reduce(packet, group=group)
        self._num_reduced = len(packet)
        self.numbers = torch.cat([packet, *(part.to(packet.device) for part in local)])

    def interpret(self, numbers: Sequence[float]) -> StepFacts:
        """End the tracker's step; returns the facts from `numbers`, which the host has read. Call it once."""
        packed, rest = list(numbers[: self._num_facts]), list(numbers[self._num_reduced :])
        if not packed[1]:
            raise ValueError("the weights of all ranks are 0: pass a positive one on each rank with a loss")
        value = rest.pop(0) if self._is_regularized else None
        num_asked, packed[-1] = divmod(packed[-1], STOP_UNIT)
        return StepFacts(
            loss=packed[0] / packed[1],
            overflow=None if self._tracker is None else self._tracker.unpack_step(packed[2:], rest),
            regularization=value,
            is_stop_asked=num_asked > 0,
            sums=tuple(numbers[self._num_facts : self._num_reduced]),
        )


def reduce_step_facts(
    loss: Tensor,
    *,
    weight: float = 1.0,
    tracker: GradientOverflowTracker | None = None,
    regularization: Tensor | None = None,
    is_stop_asked: bool = False,
    group: dist.ProcessGroup | None = None,
) -> StepFacts:
    """End the step: reduce loss and overflow over `group`, read both once. Every rank of it must call this.

    Args:
        loss: 0-dim mean loss of this rank's share of the step, on its device.
        weight: weight of this rank's loss, such as its number of predicted tokens. 0 on a rank without one,
            such as an early stage of a pipeline; its loss must be finite.
        tracker: counts of this step, for the same group. Its step ends here: do not call `end_step` as well.
        regularization: 0-dim; not reduced, because all ranks have the same weights.
        is_stop_asked: whether this rank was asked to stop; communicated to all.
        group: ranks that share the step; `None` for all.
    """
    pending = PendingFacts(
        loss,
        weight=weight,
        tracker=tracker,
        regularization=regularization,
        is_stop_asked=is_stop_asked,
        group=group,
    )
    return pending.interpret(pending.numbers.tolist())
