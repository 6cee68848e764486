"""The micro-batch of a random stream in the memory of devices, where kernels of stochastic rounding read it.

As an argument of a kernel, the micro-batch would change at each step, and a CUDA graph would repeat the
numbers of the step in which it was captured. So a kernel gets the address of a counter, and how far its
operand lags behind it: 0, or more where a backward runs after a later forward. See docs/decisions/0019. The
0 behind the micro-batch is in place of a key, see `philox.StoredKey`.

The host knows the value of each counter and never reads it. It writes a counter once a micro-batch, when the
first kernel needs it, in the order of the stream that kernels run in; each stream has a counter, because
another one would not wait for the write.

A graph that is captured has a counter, which starts at 0 before the capture and which only this graph writes.
The graph adds 1 where it first draws, and then as much as the micro-batch moves on during the capture. So
each replay has new numbers, whatever the host does meanwhile, and a failed capture changes no other counter.
The difference to the micro-batch is a constant of the graph.

With one replay for each micro-batch, a graph draws the numbers of layers that are not captured. Two graphs
that were captured in different micro-batches would reach the same one in different replays. So the keys of a
graph change with the distance between its micro-batch and that of the first capture: 0 for the first graph,
and for the backward of the same micro-batch in a graph of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalowbit import cuda_graphs
from megalowbit.errors import UserError
from megalowbit.quantize.philox import LONG

ROWS = 1024  # counters of captures that are made together; if all are taken, the next step makes others


@dataclass
class _Counter:
    tensor: Tensor  # int64, (2,): the micro-batch - offset, and 0
    value: int  # the micro-batch once the work queued so far is done; in a graph, in its first replay
    offset: int = 0
    key_change: int = 0


class DrawnStep(NamedTuple):
    """How a kernel finds a micro-batch.

    Attributes:
        counter: int64 (2,) on the device.
        lag: what to subtract from its first number.
        key_change: 64 bits; the key is the exclusive or with it.
    """

    counter: Tensor
    lag: int
    key_change: int


class StepCounters:
    """The counters of one random stream.

    Args:
        step: the stream's micro-batch, int64, 0-dim; read, never written.
    """

    def __init__(self, step: np.ndarray) -> None:
        self._step = step
        self._counters: dict[tuple[torch.device, int], _Counter] = {}
        self._captured: dict[tuple[torch.device, int, int], _Counter] = {}
        self._free: dict[torch.device, list[Tensor]] = {}  # zeros, for captures
        self._first_captured: dict[torch.device, int] = {}  # the micro-batch

    def at(self, step: int, device: torch.device) -> DrawnStep:
        """A counter on the device, and what makes `step` of it.

        Raises:
            UserError: a CUDA graph is being captured, and no counter is left.
        """
        now, capture = int(self._step), cuda_graphs.capture_of(device)
        with torch.inference_mode(False):  # a counter made in an evaluation is written in training
            if capture is None:
                counter = self._eager_counter(now, device)
            else:
                counter = self._graph_counter(now, device, capture)
        return DrawnStep(counter.tensor, counter.value - counter.offset - step, counter.key_change)

    def _eager_counter(self, now: int, device: torch.device) -> _Counter:
        """The counter of the current stream, with at least this micro-batch."""
        place = device, _stream(device)
        if not self._free.get(device):
            self._free[device] = list(torch.zeros(ROWS, 2, dtype=torch.int64, device=device).unbind())
        found = self._counters.get(place)
        if found is None:
            found = self._counters[place] = _Counter(counter_at(now, device), now)
        elif found.value < now:
            found.tensor.select(0, 0).fill_(now)
            found.value = now
        return found

    def _graph_counter(self, now: int, device: torch.device, capture: int) -> _Counter:
        """The counter of a graph, with at least this micro-batch in its first replay."""
        place = device, _stream(device), capture
        found = self._captured.get(place)
        if found is None:
            if not self._free.get(device):
                raise UserError(
                    f"a CUDA graph is captured, and no counter for its random numbers is left on {device}: "
                    "run one step first, as the warm-up of a capture"
                )
            tensor = self._free[device].pop()
            tensor.select(0, 0).add_(1)
            change = now - self._first_captured.setdefault(device, now) & LONG
            found = self._captured[place] = _Counter(tensor, now, now - 1, change)
        elif found.value < now:
            found.tensor.select(0, 0).add_(now - found.value)
            found.value = now
        return found


def counter_at(step: int, device: torch.device) -> Tensor:
    """A new counter with this micro-batch, −2⁶³ ≤ step < 2⁶³."""
    made = torch.zeros(2, dtype=torch.int64, device=device)
    made.select(0, 0).fill_(step)
    return made


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


class CountedStep(int):
    """A micro-batch whose stream has counters on devices.

    Attributes:
        counters: of the stream.
    """

    counters: StepCounters

    @staticmethod
    def of(step: int, counters: StepCounters) -> CountedStep:
        """This micro-batch of a stream."""
        made = CountedStep(step)
        made.counters = counters
        return made
