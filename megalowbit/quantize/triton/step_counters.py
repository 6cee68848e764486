"""The micro-batch of a random stream in the memory of devices, where kernels of stochastic rounding read it.

As an argument of a kernel, the micro-batch would change at each step, and a CUDA graph would repeat the
numbers of the step in which it was captured. So a kernel gets the address of a counter, and how far its
operand lags behind it: 0, or more where a backward runs after a later forward. See docs/decisions/0019. The
0 behind the micro-batch is in place of a key, see `philox.StoredKey`.

The host knows the value of each counter and never reads it. It writes a counter once a micro-batch, when the
first kernel needs it, in the order of the stream that kernels run in; each stream has a counter, because
another one would not wait for the write.

A graph that is being captured takes over a counter, which nothing else uses from then on. The advance of the
micro-batch during the capture becomes an addition in the graph. A replay therefore moves on as far as the
captured step did, whatever the host does meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megalowbit.errors import UserError


@dataclass
class _Counter:
    tensor: Tensor  # int64, (2,): the micro-batch and 0
    value: int  # the micro-batch once the work queued so far is done


class StepCounters:
    """The counters of one random stream.

    Args:
        step: the stream's micro-batch, int64, 0-dim; read, never written.
    """

    def __init__(self, step: np.ndarray) -> None:
        self._step = step
        self._counters: dict[tuple[torch.device, int], _Counter] = {}
        self._captured: dict[torch.device, _Counter] = {}

    def at(self, step: int, device: torch.device) -> tuple[Tensor, int]:
        """A counter on the device, and what to subtract from its first number to get `step`.

        Raises:
            UserError: a CUDA graph is being captured, and there is no counter yet.
        """
        now = int(self._step)
        with torch.inference_mode(False):  # a counter made in an evaluation is written in training
            counter = self._at_now(now, device)
        counter.value = max(counter.value, now)
        return counter.tensor, counter.value - step

    def _at_now(self, now: int, device: torch.device) -> _Counter:
        """The counter, whose tensor holds at least this micro-batch."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            counter = self._of_capture(device)
            if counter.value < now:
                counter.tensor.select(0, 0).add_(now - counter.value)
        else:
            place = device, _stream(device)
            found = self._counters.get(place)
            if found is None:
                found = _Counter(counter_at(now, device), now)
                self._counters[place] = found
            elif found.value < now:
                found.tensor.select(0, 0).fill_(now)
            counter = found
        return counter

    def _of_capture(self, device: torch.device) -> _Counter:
        if device not in self._captured:
            places = [place for place in self._counters if place[0] == device]
            if not places:
                raise UserError(
                    f"a CUDA graph is captured before stochastic rounding has run on {device}: "
                    "run one step first, as the warm-up of a capture"
                )
            self._captured[device] = self._counters.pop(places[-1])
        return self._captured[device]


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
