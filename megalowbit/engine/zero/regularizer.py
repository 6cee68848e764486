"""The dual-range regulariser where every rank holds pieces of gradients.

Its gradient is made element by element from the weight and the number of the whole weight's elements, so
each rank adds it to the pieces it owns, before they are measured; only its value is summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megalowbit.distributed import process_group
from megalowbit.engine.zero.measure import Piece
from megalowbit.layers.regularizer import DualRangeRegularizer, whole_numel


class PieceRegularizer:
    """Adds a regulariser's gradient to pieces. Make it before the parameters are partitioned.

    Args:
        regularizer: whose settings and weights it takes, and whose `value` it sets.
    """

    def __init__(self, regularizer: DualRangeRegularizer) -> None:
        self._regularizer = regularizer
        self._numel = {id(weight): whole_numel(weight) for weight in regularizer.weights()}

    @torch.no_grad()
    def add_gradients(
        self, pieces: Sequence[Piece], loss_scale: float, *, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Once per optimizer step; collective.

        Args:
            pieces: this rank's.
            loss_scale: S by which their gradients are multiplied.
            group: the data-parallel ranks, over which the value is summed.
            device: one that `group` can exchange.
        """
        total = torch.zeros((), dtype=torch.float64, device=device)
        for parameter, gradient, start in pieces:
            numel = self._numel.get(id(parameter))
            if numel is None:
                continue
            partition = getattr(parameter, "ds_tensor", None)
            weight = parameter.data.view(-1)[start:] if partition is None else partition.data
            weight = weight[: gradient.numel()].to(gradient.device)
            total += self._regularizer.add_piece(weight, gradient.view(-1), loss_scale, numel=numel).to(
                device
            )
        if process_group.world_size(group) > 1:
            dist.all_reduce(total, group=group)
        self._regularizer.value = self._regularizer.sum_over_shards(total)
