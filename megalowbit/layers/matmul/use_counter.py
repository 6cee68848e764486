"""Numbers of a layer's uses in a micro-batch, the stream of a layer without a model's, counts of products.

A layer that runs twice in one forward must round with different random numbers each time. A forward that
activation checkpointing repeats during backward must draw the same numbers as the first time. Segments are
recomputed last to first, so replays are numbered downwards. If one layer is used several times *inside* one
checkpointed segment, its uses swap their numbers among themselves, which causes no bias.

Uses after replays begin a new group, and their replays repeat the numbers of this group. So numbers go on and
are not drawn again where many forwards and backwards belong to one micro-batch, as in a model that is trained
in evaluation mode, in which the stream stands still.

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

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalowbit import cuda_graphs
from megalowbit.quantize.random_stream import RandomStream


def is_recomputing() -> bool:
    """Whether this code runs inside a backward pass, where checkpointing recomputes activations."""
    return bool(torch._C._current_graph_task_id() != -1)


def has_begun_forward(stream: RandomStream) -> bool:
    """Whether a training forward of the converted model runs now, whose hook has advanced the stream.

    Looks for that call on Python's stack. This is exact also after exceptions and in copies, and needs no
    second hook, which `torch.compile` would have to trace. It takes microseconds, and is asked only where the
    current micro-batch has had a backward: by the first layer of a part of the model that is called, or in
    models that compute gradients within their forward.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == nn.Module._call_impl.__name__ else None
        if isinstance(module, nn.Module) and module.training:
            hooks = module._forward_pre_hooks.values()
            if any(getattr(hook, "stream", None) is stream for hook in hooks):
                return True
        frame = frame.f_back
    return False


class Use(NamedTuple):
    """One use of a layer: micro-batch, number within it, whether it is a replay, whether the layer trains."""

    step: int
    number: int
    is_replay: bool
    is_training: bool


class UseCounter:
    """Numbers the uses of one layer within a micro-batch, starting at 0."""

    _first = 0  # of the uses since the last replays; pickles of earlier versions lack it

    def __init__(self) -> None:
        self._step = -1
        self._uses = 0
        self._replays = 0

    def next(self, step: int, *, is_replay: bool = False) -> int:
        """The number of the use that starts now; a new micro-batch (`step`) restarts at 0."""
        if step != self._step:
            self._step, self._first, self._uses, self._replays = step, 0, 0, 0
        if is_replay and self._uses:
            self._replays += 1
            return self._first + (self._uses - self._replays) % self._uses
        if self._replays:
            self._first, self._uses, self._replays = self._first + self._uses, 0, 0
        self._uses += 1
        return self._first + self._uses - 1


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

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved state of the stream, also before the first use.

        Raises:
            UserError: see `RandomStream.load_state_dict`.
        """
        stream = self.stream or RandomStream(0, self.rank)
        stream.load_state_dict(state)
        self.stream, self._seeded_at = stream, (-1, -1)  # no use of the layer draws the seed

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
    """How many of a layer's products ran in each precision; the device counts what it decides.

    In replays of a CUDA graph, only the device counts.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._on_device: dict[tuple[str, torch.device], Tensor] = {}

    def add(self, product: str, precision: str) -> None:
        """Count a product whose precision the host knows."""
        precisions = self._counts.setdefault(product, {})
        precisions[precision] = precisions.get(precision, 0) + 1

    def on_device(self, product: str, device: torch.device) -> Tensor:
        """How many products the device decided about, and how many of them it computed in bf16.

        Returns:
            int32 (2,), which the device increases.

        Raises:
            UserError: a CUDA graph is being captured, and the layer has not run before.
        """
        key = product, device
        if key not in self._on_device:
            cuda_graphs.refuse(
                device, "setting the counts of FP8 products to 0", "run one step first, as the warm-up"
            )
            self._on_device[key] = torch.zeros(2, dtype=torch.int32, device=device)
        return self._on_device[key]

    def table(self) -> dict[str, dict[str, int]]:
        """Product → precision → number; waits for devices that have decided about products."""
        table = {product: dict(precisions) for product, precisions in self._counts.items()}
        for (product, _), tensor in self._on_device.items():
            decided, declined = tensor.tolist()
            for precision, number in (("fp8", decided - declined), ("bf16", declined)):
                if number:
                    precisions = table.setdefault(product, {})
                    precisions[precision] = precisions.get(precision, 0) + number
        return table

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: numbers only, because a copy may run on another device."""
        return {"_counts": self.table(), "_on_device": {}}


def _draw_seed() -> int:
    """A seed that no other layer has, drawn without a device synchronisation."""
    return int(torch.randint(2**62, (), device="cpu"))
