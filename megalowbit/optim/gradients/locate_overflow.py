"""Locating an overflow: the first tensor and its rank.

Runs only after a step that overflowed, so it may read the device and communicate. Every rank sends which of
its gradients are not finite, in the order of backward, and all ranks derive the same answer. If gradients
were averaged before they were checked, the same ones are infinite on all ranks; then no rank is named.

Not covered: the micro-batch, and gradients of activations, in which an overflow often begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megalowbit.distributed.agreement import gather
from megalowbit.optim.gradients.report import Overflow


@dataclass(frozen=True, kw_only=True)
class RankOverflow:
    """The non-finite gradients of one rank.

    Attributes:
        rank: in the whole job.
        tensors: (index in the order of backward, name) of each gradient that is not finite, ascending.
        num_gradients: number of gradients of the rank.
        is_own: whether they were certainly checked before any averaging over ranks.
        later_stages: number of pipeline stages that run their backward before this rank's.
    """

    rank: int
    tensors: Sequence[tuple[int, str]]
    num_gradients: int
    is_own: bool
    later_stages: int = 0


def joined(each: Sequence[RankOverflow]) -> RankOverflow:
    """Merge the results of one rank's optimizers."""
    return RankOverflow(
        rank=each[0].rank,
        tensors=sorted(tensor for one in each for tensor in one.tensors),
        num_gradients=sum(one.num_gradients for one in each),
        is_own=all(one.is_own for one in each if one.num_gradients),
        later_stages=each[0].later_stages,
    )


def locate_overflow(seen: RankOverflow, group: dist.ProcessGroup | None) -> Overflow | None:
    """Combine the results of all ranks of `group` (None: this rank only); every one of them must call it.

    Returns:
        The same on all ranks; None if all gradients are finite.
    """
    gathered = [seen] if group is None else gather(seen, group)
    hit = [one for one in gathered if one.tensors]
    if not hit:
        return None
    is_alike = len(gathered) > 1 and len({tuple(one.tensors) for one in gathered}) == 1
    # earliest in backward order; ranks with other layers count from their own first gradient
    first = min(hit, key=lambda one: (one.later_stages, one.tensors[0][0], one.rank))
    return Overflow(
        tensor=first.tensors[0][1],
        rank=first.rank if first.is_own or not is_alike else None,
        num_tensors=len(first.tensors),
        num_gradients=first.num_gradients,
        ranks=tuple(sorted(one.rank for one in hit)),
    )
