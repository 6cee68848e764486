"""Norm, flag and zeros of gradients of which every rank holds pieces.

A parameter is cut over the data-parallel ranks wherever ZeRO's flat buffers end, and perhaps over
model-parallel ranks before that. Every element lies on one rank, but for parameters that model-parallel
ranks hold alike, which are counted once. So squares just add up over all ranks, in one small message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import gather
from megalowbit.engine.zero.scaler import ZeroLossScaler
from megalowbit.optim.gradients.norm import GradientNorm, is_counted_once, measure_gradients
from megalowbit.optim.gradients.report import Overflow
from megalowbit.optim.instruments import Instruments


class Piece(NamedTuple):
    """Part of one parameter's gradient that this rank has, without padding.

    Attributes:
        parameter: the model's; it may be partitioned itself.
        gradient: fp32, of any shape.
        start: place of its first element in the flattened parameter.
    """

    parameter: torch.nn.Parameter
    gradient: Tensor
    start: int


class BeforeMeasure(Protocol):
    """Adds to the gradients of a step before they are measured."""

    def __call__(self, pieces: list[Piece], loss_scale: float) -> object:
        """`pieces` are this rank's; their gradients are multiplied by `loss_scale`."""


class GradientPieces:
    """Measures the pieces of all ranks together.

    Args:
        parameters: all that are trained, also those this rank has no piece of; in the same order on ranks
            that hold the same.
        names: of each.
        gradient_norm: "global" or "sum_of_norms".
        copies: ranks that hold copies of what is not sharded; None: there are none.
        group: all ranks; None: this process alone.
        peers: the data-parallel ranks, over which gradients are averaged.

    Attributes:
        later_stages: of a pipeline, which run their backward before this rank's.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        names: Sequence[str],
        gradient_norm: GradientNorm,
        copies: dist.ProcessGroup | None,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (0,),
    ) -> None:
        self.group = group
        self.later_stages = 0
        self._peers = tuple(peers)
        self._names = list(names)
        self._gradient_norm = gradient_norm
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._is_counted = [_is_counted(parameter, copies) for parameter in parameters]

    def name_of(self, parameter: torch.nn.Parameter) -> str:
        """Its name."""
        return self._names[self._places[id(parameter)]]

    def measure(
        self, pieces: Sequence[Piece], *, count_zeros: bool, figures: Sequence[Tensor] = ()
    ) -> list[float]:
        """Look at all gradients of a step; collective.

        Args:
            pieces: this rank's.
            count_zeros: also count elements that are exactly zero.
            figures: (n,) each; read together with the result.

        Returns:
            Norm (0 where the flag is set), flag (> 0: something is not finite), zeros, then the figures.
        """
        measured = self._measure(pieces, count_zeros=count_zeros, is_exact=False)
        norm, flag, zeros, *rest = torch.cat([measured, *(each.to(measured) for each in figures)]).tolist()
        if flag > 0:  # rare: was it only a square that fp32 does not hold?
            norm, flag, zeros = self._measure(pieces, count_zeros=count_zeros, is_exact=True).tolist()
        return [norm, flag, zeros, *rest]

    def _measure(self, pieces: Sequence[Piece], *, count_zeros: bool, is_exact: bool) -> Tensor:
        counted: list[Tensor] = []
        uncounted: list[Tensor] = []
        for piece in pieces:
            is_mine = self._is_counted[self._places[id(piece.parameter)]]
            (counted if is_mine else uncounted).append(piece.gradient)
        # without the group: pieces that were offloaded lie where the group cannot exchange anything
        norm, flag, zeros = measure_gradients(
            counted, uncounted=uncounted, count_zeros=count_zeros, is_exact=is_exact
        )
        device = process_group.exchange_device(self.group) if self.group is not None else norm.device
        squares = norm.square().reshape(1)
        if self._gradient_norm == "sum_of_norms":
            squares = self._squares_of_each(pieces, norm.device)
        squares = torch.where(flag > 0, 0.0, squares)
        packet = torch.cat([flag.reshape(1), zeros.reshape(1), squares]).to(device)
        if self.group is not None:
            dist.all_reduce(packet, op=dist.ReduceOp.SUM, group=self.group)
        return torch.cat([packet[2:].sqrt().sum().reshape(1), packet[:2]])

    def _squares_of_each(self, pieces: Sequence[Piece], device: torch.device) -> Tensor:
        squares = torch.zeros(len(self._is_counted), dtype=torch.float64, device=device)
        for piece in pieces:
            place = self._places[id(piece.parameter)]
            if self._is_counted[place]:
                squares[place] += torch.linalg.vector_norm(piece.gradient, dtype=torch.float64) ** 2
        return squares

    def locate_overflow(self, pieces: Sequence[Piece]) -> Overflow | None:
        """The first gradient in the order of backward that is not finite; collective, reads the device.

        Gradients have been averaged by now, so a rank is named only where it holds its part of the model
        alone; else all are that share the part. A tied weight goes by the name that its first stage has.
        """
        last = len(self._names) - 1
        mine = {
            (last - place, self._names[place])
            for piece, place in ((piece, self._places[id(piece.parameter)]) for piece in pieces)
            if not (_is_copy(piece.parameter) or torch.isfinite(piece.gradient).all())
        }
        own = (self.later_stages, self._peers, mine, len(self._names))
        gathered = [own] if self.group is None else gather(own, self.group)
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
    """Pipeline stages mark what another stage has as well; both have the sum of their gradients."""
    return getattr(parameter, "ds_pipe_replicated", False)


@dataclass(frozen=True, kw_only=True)
class ZeroParts:
    """What an adopted optimizer works with.

    Attributes:
        loss_scaler: over the run's grad scaler.
        gradients: measures this rank's pieces.
        instruments: hooks of scale strategies.
        before_measure: of the regulariser; None: nothing is added.
    """

    loss_scaler: ZeroLossScaler
    gradients: GradientPieces
    instruments: Instruments
    before_measure: BeforeMeasure | None = None
