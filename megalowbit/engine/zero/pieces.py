"""Measures gradients of which every rank holds pieces: norm, overflow flag, zeros, overflow location.

ZeRO partitions parameters over the data-parallel ranks at the ends of its flat buffers, perhaps after
model-parallel sharding. Every element is on exactly one rank, except those of parameters replicated over
model-parallel ranks, which are counted once. Squares can therefore be summed over all ranks, in one small
message. This file also adds the regulariser's gradient to the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import gather
from megalowbit.layers.regularizer import DualRangeRegularizer, full_numel
from megalowbit.optim.gradients.norm import Measurement, is_counted_once, measure_gradients
from megalowbit.optim.gradients.report import Overflow
from megalowbit.optim.optimizers.options import StepOptions


class Piece(NamedTuple):
    """This rank's part of one parameter's gradient, without padding.

    Attributes:
        parameter: the model's parameter, which may itself be partitioned.
        gradient: fp32, of any shape.
        start: offset of its first element in the flattened parameter.
    """

    parameter: torch.nn.Parameter
    gradient: Tensor
    start: int


class GradientPieces:
    """Measures the pieces of all ranks together.

    Args:
        parameters: all trained parameters, including those without a piece on this rank, in the same order on
            ranks with the same parameters.
        names: of the parameters.
        options: of the step.
        copies: ranks with copies of the unsharded parameters, if any.
        peers: data-parallel ranks, over which gradients are averaged.

    Attributes:
        later_stages: number of later pipeline stages; they run backward before this rank's stage.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        names: Sequence[str],
        options: StepOptions,
        copies: dist.ProcessGroup | None,
        peers: Sequence[int] = (0,),
    ) -> None:
        self.later_stages = 0
        self._options, self._group = options, options.training_group
        self._peers = tuple(peers)
        self._names = list(names)
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._is_counted = [_is_counted(parameter, copies) for parameter in parameters]

    def name_of(self, parameter: torch.nn.Parameter) -> str:
        return self._names[self._places[id(parameter)]]

    def measure(self, pieces: Sequence[Piece], *, is_exact: bool) -> Measurement:
        """Measure all ranks' pieces of a step's gradients; collective.

        If the flag is set, the norm is that of the ranks without an overflow: finite, but of no use.
        """
        # without the group, because offloaded pieces are on a device where the group cannot communicate
        own = measure_gradients(
            [piece.gradient for piece in pieces],
            is_counted=[self._is_counted[self._places[id(piece.parameter)]] for piece in pieces],
            count_zeros=self._options.log_num_zeros_in_grad,
            is_exact=is_exact,
        )
        squares = own.norm.square().reshape(1)
        if self._options.gradient_norm == "sum_of_norms":
            squares = self._squares_of_each(pieces, own.norm.device)
        zeros = torch.zeros_like(own.norm) if own.zeros is None else own.zeros
        packet = torch.cat([torch.stack([own.flag, zeros]), torch.where(own.flag > 0, 0.0, squares)])
        if self._group is not None:
            packet = packet.to(process_group.exchange_device(self._group))
            collectives.all_reduce(packet, op=dist.ReduceOp.SUM, group=self._group)
        return Measurement(
            norm=packet[2:].sqrt().sum(), flag=packet[0], zeros=None if own.zeros is None else packet[1]
        )

    def _squares_of_each(self, pieces: Sequence[Piece], device: torch.device) -> Tensor:
        squares = torch.zeros(len(self._is_counted), dtype=torch.float64, device=device)
        for piece in pieces:
            place = self._places[id(piece.parameter)]
            if self._is_counted[place]:
                squares[place] += torch.linalg.vector_norm(piece.gradient, dtype=torch.float64) ** 2
        return squares

    def locate(self, pieces: Sequence[Piece]) -> Overflow | None:
        """The first non-finite gradient in backward order; collective, reads the device.

        Gradients are already averaged, so a single rank is named only if no other rank shares its part of the
        model; otherwise all ranks of the part are named. A tied weight has the name used by its first stage.
        """
        last = len(self._names) - 1
        hits = {
            (last - place, self._names[place])
            for piece, place in ((piece, self._places[id(piece.parameter)]) for piece in pieces)
            if not (_is_copy(piece.parameter) or torch.isfinite(piece.gradient).all())
        }
        own = (self.later_stages, self._peers, hits, len(self._names))
        gathered = [own] if self._group is None else gather(own, self._group)
        hit = [each for each in gathered if each[2]]
        if not hit:
            return None
        _, ranks, _, num_gradients = min(hit, key=lambda each: (each[0], min(each[2]), each[1]))
        found = sorted(set().union(*(tensors for _, peers, tensors, _ in hit if peers == ranks)))
        return Overflow(
            tensor=found[0][1],
            rank=ranks[0] if len(ranks) == 1 else None,
            num_tensors=len(found),
            num_gradients=num_gradients,
            ranks=ranks,
        )


def _is_counted(parameter: torch.nn.Parameter, copies: dist.ProcessGroup | None) -> bool:
    return not _is_copy(parameter) and is_counted_once(parameter, copies)


def _is_copy(parameter: torch.nn.Parameter) -> bool:
    """Whether another pipeline stage has the same weight; both copies have the sum of their gradients."""
    return getattr(parameter, "ds_pipe_replicated", False)


class PieceRegularizer:
    """Adds the dual-range regulariser's gradient to pieces. Create it before parameters are partitioned.

    The gradient is elementwise and depends only on the weight and the number of elements of the full weight.
    Each rank therefore adds it to its own pieces before they are measured. Only the regulariser's `value` is
    summed over ranks.
    """

    def __init__(self, regularizer: DualRangeRegularizer) -> None:
        self._regularizer = regularizer
        self._numel = {id(weight): full_numel(weight) for weight in regularizer.weights()}

    @torch.no_grad()
    def add_gradients(
        self, pieces: Iterable[Piece], loss_scale: float, *, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Add the gradient to pieces multiplied by the loss scale, once per optimizer step; collective.

        The value is summed over `group`, the data-parallel ranks; `device` must be one it can communicate on.
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
            collectives.all_reduce(total, group=group)
        self._regularizer.value = self._regularizer.sum_over_shards(total)
