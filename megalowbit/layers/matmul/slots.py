"""What a layer's slots hold: an observer, which receives counts, a chooser, which picks recipes, and more.

Telemetry implements `Observer`, speculation implements `Chooser` and `Probe`. Layers depend on these
protocols only, and an empty slot costs nothing. A chooser returns each layer's recipe for the step and may
inspect single uses with a probe. The optimizer implements `GradientSums`, an attribute of the weight.

Order of the calls in one use:

- forward: the probe gets input and weight; they are quantised and multiplied; the probe gets `output`.
- backward: the probe gets the output gradient; it is quantised; the probe gets `grad_input` and
  `grad_weight`, if they are computed.

The probe gets the weight also if the quantised one comes from the cache. Nothing is copied for a probe: it
must not change tensors, and must copy what it keeps. It draws no numbers from torch's generators. Autocast is
off during its calls.

Activation checkpointing repeats forwards. For these no chooser and no probe is called; the following backward
is passed to the probe of the repeated forward. With reentrant checkpointing of a layer that one micro-batch
uses several times, or of a layer without the model's random stream, the probe gets forwards only, because it
is unknown which one is repeated.

Not covered: weights split into parameters, whose products are wider than the weight.

`InputRecord` and `StaticInput` are for inputs that are quantised by numbers recorded before, and not by those
of their batch: see `conversion.static_inputs`, which implements the record.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.autograd.graph import Node

from megalowbit.layers.matmul.operand import MatmulOperand
from megalowbit.layers.matmul.use_counter import Use
from megalowbit.layers.recipe import Recipe

logger = logging.getLogger("megalowbit")


@runtime_checkable
class Observer(Protocol):
    """Receives the counts of each quantised operand."""

    def observe(self, layer: str, role: str, counts: Tensor, error: Tensor) -> None:
        """Take the counts of one tensor; called in training mode only, once for each quantisation.

        Args:
            layer: the layer's name in the converted model.
            role: `"input"`, `"weight"` or `"grad_output"`.
            counts: int64 on the layer's device, one for each of `COUNT_NAMES`. The observer may keep it, but
                must not write to it: layers that share an input report the same tensors.
            error: float64 on the layer's device, one for each of `ERROR_NAMES`, likewise.
        """


@functools.lru_cache(maxsize=1)  # so it is logged once
def warn_of_uncounted() -> None:
    """Say that a backward passed a layer whose observer gets nothing."""
    logger.warning(
        "the model is in eval() mode, so its observer counts nothing: call model.train() before training"
    )


@runtime_checkable
class Probe(Protocol):
    """Inspects the operands and products of one use of a layer; called in training mode only."""

    def observe_operand(
        self, role: str, operand: Tensor, full_amax: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor | None:
        """Take an operand as the layer got it, before it is quantised.

        Args:
            role: `"input"`, `"weight"` or `"grad_output"`.
            operand: (…, in_features), (out_features, in_features) or (…, out_features); this rank's shard of
                it in a tensor-parallel layer.
            full_amax: maps the amax of this rank's shard (fp32, 0-dim) to that of the full operand; `None`:
                the operand is full. Collective over the tensor-parallel ranks, so all call it or none.

        Returns:
            Its amax (fp32, 0-dim, on the operand's device) if the probe has computed it; the quantizer then
            need not search for it. NaN or infinity if the operand has one. `None`: not computed.
        """

    def observe_product(
        self, product: str, left: MatmulOperand, right: MatmulOperand, result: Tensor, bias: Tensor | None
    ) -> None:
        """Inspect a product just computed from the inspected operands.

        Args:
            product: `"output"`, `"grad_input"` or `"grad_weight"`.
            left: as multiplied: input; grad_output; grad_output (the product uses its transpose).
            right: as multiplied: weight (the product uses its transpose); weight; input.
            result: (rows, cols) of this rank, before tensor-parallel ranks sum it.
            bias: (cols,), already added to `result` of `"output"`; `None` if no bias was added.
        """


@runtime_checkable
class Chooser(Protocol):
    """Chooses the recipe of each layer's products."""

    def recipe(self, layer: str, base: Recipe) -> Recipe:
        """The recipe of a layer's products; constant within an optimizer step, and the same on all ranks.

        Args:
            layer: the layer's name in the converted model.
            base: the layer's own recipe; the result may differ from it in quantizer names only.
        """

    def probe(self, layer: str, use: Use) -> Probe | None:
        """The probe for a use of a layer, or `None`; called in training mode, never for repeated forwards."""


class GradientSums(Protocol):
    """Sums the gradients of parameters in fp32; a parameter's `grad_buffer`, if it has one."""

    def add_gradient(
        self, parameter: Tensor, accumulator: Node, add: Callable[[Tensor, float], bool]
    ) -> bool:
        """Let a layer add a gradient to a parameter's sum instead of returning it; called in backward.

        Args:
            parameter: with this buffer as its `grad_buffer`.
            accumulator: autograd's node that would get the gradient.
            add: takes the sum, fp32 in the parameter's shape, and a factor. It adds factor · gradient and
                returns true, or it changes nothing and returns false.

        Returns:
            Whether the gradient was added. False also if autograd has to see it, for example for a hook.
        """


class InputRecord(Protocol):
    """Records the range of one layer's inputs."""

    def add(self, input: Tensor, found_before: dict[tuple[object, ...], Any] | None) -> None:
        """Take an input before it is split and quantised; not called when a forward is repeated.

        Args:
            input: (…, in_features) as the layer got it; this rank's shard in a row-parallel layer.
            found_before: what siblings have found in this input, to use and to add to; `None`: not shared.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticInput:
    """The numbers by which a layer in evaluation mode quantises its input; siblings have the same object.

    Attributes:
        maximum: largest magnitude of what is quantised: the input, or the input without `mean`. Much larger
            elements saturate; a tensor scale that is a power of two leaves room up to a factor of 2.
        mean: (in_features,), fp32, the row that a split by the mean subtracts from each token; `None`: the
            recipe does not split its inputs.
        counts: (2,) int64 on the layer's device: elements so far, and those above `maximum`; `None`: not
            counted.
    """

    maximum: float
    mean: Tensor | None = None
    counts: Tensor | None = None

    def count(self, quantised: Tensor) -> None:
        """Add the elements of an input, without its mean, to `counts`."""
        if self.counts is not None:
            self.counts[0] += quantised.numel()
            self.counts[1] += (quantised.detach().abs() > self.maximum).sum()
