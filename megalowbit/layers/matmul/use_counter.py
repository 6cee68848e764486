"""Which use of a layer within one micro-batch this is, and the random stream of a layer without a model's.

A layer that runs twice in one forward must round with different random numbers each time; a forward that
activation checkpointing runs again during backward must draw the same ones as the first time. Segments are
recomputed last to first, so a replay counts down. One layer used several times *inside* one checkpointed
segment is the case this cannot tell apart: its uses then swap their numbers among themselves, which biases
nothing.

Two limits. Any forward inside any backward (in a hook, for a gradient penalty) is taken for a replay. And
a replay is numbered within the current micro-batch, so checkpointing is exact only if each micro-batch's
backward runs before the next one's forward. Where several forwards come first (pipelines: 1F1B, GPipe), a
replay draws the numbers of the latest micro-batch begun, not those of the forward it repeats. Then operands
that forward rounds stochastically differ in backward from what they were; and with reentrant checkpointing,
or in a compiled model, micro-batches replayed between the same two forwards round their output gradients
with the same numbers. Not affected: recipes that round all but output gradients to nearest, with
non-reentrant checkpointing and without compilation; and whoever sets the stream back to the micro-batch of
the forward repeated (`RandomStream.at`), as `engine.pipeline.stage` does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megalowbit.quantize.random_stream import RandomStream


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
        """The number of the use that starts now; a new micro-batch (`step`) starts from 0."""
        if step != self._step:
            self._step, self._uses, self._replays = step, 0, 0
        if is_replay and self._uses:
            self._replays += 1
            return (self._uses - self._replays) % self._uses
        self._uses += 1
        return self._uses - 1


class OwnStream:
    """The random stream of a layer that shares none, seeded at its first use from torch's CPU generator.

    Attributes:
        rank: data-parallel rank, if one was given.
        stream: `None` before the first use.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self.stream: RandomStream | None = None
        self._seeded_at: tuple[int, int] | None = None  # micro-batch and use

    def advance(self, *, is_training: bool, is_replay: bool) -> RandomStream:
        """The stream for the use that starts now: each training forward is one micro-batch."""
        if self.stream is None:
            self.stream = RandomStream(_draw_seed(), self.rank)
        if is_training and not is_replay:
            self.stream.advance()
        return self.stream

    def keep_torchs_generator_in_step(self, step: int, use: int, *, is_replay: bool) -> None:
        """Draw the seed again where checkpointing repeats the forward that has drawn it.

        It has set torch's generator back to before the seed was drawn; dropouts behind this layer would not
        recompute the masks they had.
        """
        if self._seeded_at is None:
            self._seeded_at = (step, use)
        elif is_replay and self._seeded_at == (step, use):
            _draw_seed()


def _draw_seed() -> int:
    """A seed that no other layer has, without asking a device."""
    return int(torch.randint(2**62, (), device="cpu"))
