"""Numbers of a layer's uses in a micro-batch, the stream of a layer without a model's, counts of products.

A layer that runs twice in one forward must round with different random numbers each time. A forward that
activation checkpointing repeats during backward must draw the same numbers as the first time. Segments are
recomputed last to first, so replays are numbered downwards. If one layer is used several times *inside* one
checkpointed segment, its uses swap their numbers among themselves, which causes no bias.

Two limits:

- Any forward inside any backward (in a hook, for a gradient penalty) is taken for a replay.
- A replay is numbered within the current micro-batch, so checkpointing is exact only if each micro-batch's
  backward runs before the next one's forward. If several forwards come first (pipelines: 1F1B, GPipe), a
  replay draws the numbers of the latest micro-batch, not those of the forward that it repeats. Operands that
  forward rounds stochastically then differ in backward. With reentrant checkpointing, or in a compiled model,
  micro-batches replayed between the same two forwards also round their output gradients with the same
  numbers.

The second limit does not apply to recipes that round everything but output gradients to nearest, with
non-reentrant checkpointing and without compilation. Nor does it apply if the caller sets the stream back to
the micro-batch of the repeated forward (`RandomStream.at`), as `engine.pipeline.stage` does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalowbit.quantize.random_stream import RandomStream


def is_recomputing() -> bool:
    """Whether this code runs inside a backward pass, where checkpointing recomputes activations."""
    return bool(torch._C._current_graph_task_id() != -1)


class Use(NamedTuple):
    """One use of a layer: micro-batch, number within it, whether it is a replay, whether the layer trains."""

    step: int
    number: int
    is_replay: bool
    is_training: bool


class UseCounter:
    """Numbers the uses of one layer within a micro-batch, starting at 0."""

    def __init__(self) -> None:
        self._step = -1
        self._uses = 0
        self._replays = 0

    def next(self, step: int, *, is_replay: bool = False) -> int:
        """The number of the use that starts now; a new micro-batch (`step`) restarts at 0."""
        if step != self._step:
            self._step, self._uses, self._replays = step, 0, 0
        if is_replay and self._uses:
            self._replays += 1
            return (self._uses - self._replays) % self._uses
        self._uses += 1
        return self._uses - 1


class LayerStream:
    """The random stream of a layer without a shared one, seeded at its first use from torch's CPU generator.

    Attributes:
        rank: the data-parallel rank, if given.
        stream: `None` before the first use.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self.stream: RandomStream | None = None
        self._seeded_at: tuple[int, int] | None = None  # micro-batch and use

    def advance(self, *, is_training: bool, is_replay: bool) -> RandomStream:
        """The stream for the use that starts now; each training forward is one micro-batch."""
        if self.stream is None:
            self.stream = RandomStream(_draw_seed(), self.rank)
        if is_training and not is_replay:
            self.stream.advance()
        return self.stream

    def repeat_seed_draw(self, step: int, use: int, *, is_replay: bool) -> None:
        """Draw the seed again if checkpointing repeats the forward that drew it.

        Checkpointing has reset torch's generator to its state before the seed was drawn. Without this draw,
        later dropouts would recompute other masks.
        """
        if self._seeded_at is None:
            self._seeded_at = (step, use)
        elif is_replay and self._seeded_at == (step, use):
            _draw_seed()


class ProductCounts:
    """How many of a layer's products ran in each precision; the device counts what it decides."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._declined: dict[tuple[str, torch.device], Tensor] = {}

    def add(self, product: str, precision: str) -> None:
        """Count a product."""
        precisions = self._counts.setdefault(product, {})
        precisions[precision] = precisions.get(precision, 0) + 1

    def declined(self, product: str, device: torch.device) -> Tensor:
        """How many products counted as FP8 the device computed in bf16: int32, 0-dim, which it increases."""
        key = product, device
        if key not in self._declined:
            self._declined[key] = torch.zeros((), dtype=torch.int32, device=device)
        return self._declined[key]

    def table(self) -> dict[str, dict[str, int]]:
        """Product → precision → number; waits for devices that have decided about products."""
        table = {product: dict(precisions) for product, precisions in self._counts.items()}
        for (product, _), tensor in self._declined.items():
            number = int(tensor)
            if number:
                precisions = table[product]
                precisions["bf16"] = precisions.get("bf16", 0) + number
                precisions["fp8"] -= number
                if not precisions["fp8"]:
                    del precisions["fp8"]
        return table

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: numbers only, because a copy may run on another device."""
        return {"_counts": self.table(), "_declined": {}}


def _draw_seed() -> int:
    """A seed that no other layer has, drawn without a device synchronisation."""
    return int(torch.randint(2**62, (), device="cpu"))
