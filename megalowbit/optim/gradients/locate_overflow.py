"""Where did gradients overflow: which tensor was first, on which rank.

Asked only after a step that overflowed, so it may read from the device and talk: every rank tells which of
its gradients are not finite, in the order in which backward made them, and all come to the same answer.
Gradients that were averaged before anyone looked are infinite on all ranks alike; then no rank is named.
Not covered: which micro-batch it was, and activations' gradients, in which an overflow often begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megalowbit.distributed.agreement import gather
from megalowbit.optim.gradients.report import Overflow


@dataclass(frozen=True, kw_only=True)
class RankOverflow:
    """What one rank saw.

    Attributes:
        rank: in the whole job.
        tensors: place in the order of backward and name of each gradient that is not finite, ascending.
        num_gradients: how many gradients the rank has.
        is_own: whether they are known to have been looked at before any averaging over ranks.
        later_stages: how many stages of a pipeline have run their backward before this rank's.
    """

    rank: int
    tensors: Sequence[tuple[int, str]]
    num_gradients: int
    is_own: bool
    later_stages: int = 0


def joined(each: Sequence[RankOverflow]) -> RankOverflow:
    """What the optimizers of one rank saw, as one."""
    return RankOverflow(
        rank=each[0].rank,
        tensors=sorted(tensor for one in each for tensor in one.tensors),
        num_gradients=sum(one.num_gradients for one in each),
        is_own=all(one.is_own for one in each if one.num_gradients),
        later_stages=each[0].later_stages,
    )


def locate_overflow(seen: RankOverflow, group: dist.ProcessGroup | None) -> Overflow | None:
    """Put together what all ranks of `group` (None: this one alone) saw; every one of them must call it.

    Returns:
        The same on all ranks; None if no rank saw anything that is not finite.
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
