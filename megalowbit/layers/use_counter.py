"""Which use of a layer within one micro-batch this is.

A layer that runs twice in one forward must round with different random numbers each time; a forward that
activation checkpointing runs again during backward must draw the same ones as the first time. Segments are
recomputed last to first, so a replay counts down. One layer used several times *inside* one checkpointed
segment is the case this cannot tell apart: its uses then swap their numbers among themselves, which biases
nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def is_recomputing() -> bool:
    """Whether this code runs inside a backward pass: checkpointing recomputes activations there."""
    return bool(torch._C._current_graph_task_id() != -1)


class Use(NamedTuple):
    """One use of a layer: micro-batch, number within it, whether it repeats one, whether the layer trains."""

    step: int
    number: int
    is_replay: bool
    is_training: bool


class UseCounter:
    """Numbers the uses of one layer within a micro-batch, from 0."""

    def __init__(self) -> None:
        self._step = -1
        self._uses = 0
        self._replays = 0

    def next(self, step: int, *, is_replay: bool = False) -> int:
        """The number of the use that starts now.

        Args:
            step: the micro-batch; a new one starts from 0.
            is_replay: whether an earlier use is being recomputed.
        """
        if step != self._step:
            self._step, self._uses, self._replays = step, 0, 0
        if is_replay and self._uses:
            self._replays += 1
            return (self._uses - self._replays) % self._uses
        self._uses += 1
        return self._uses - 1
