"""What may sit in a layer's slots: an observer, which gets counts, and a chooser, which picks recipes.

Telemetry implements `Observer` and speculation `Chooser` and `Probe`; layers only know these protocols, and
an empty slot costs nothing. A chooser gives each layer its recipe for the step and may look at single uses
with a probe. In a use, forward shows input and weight, quantises, multiplies, and shows `output`; backward
shows the output gradient, quantises, and shows `grad_input` and `grad_weight`, as far as they are asked for.
A weight that comes quantised out of the cache is looked at all the same. Nothing is copied for a probe: it
must change no tensor, and what it wants to keep it copies. It draws no numbers from torch's generators, and
autocast is off while it works.

Activation checkpointing repeats forwards, for which no chooser is asked and no probe is called again; the
backward behind them is shown to the probe of the forward they repeat. Where reentrant checkpointing repeats a
layer that one micro-batch uses several times, or a layer without the model's random stream, only forwards are
shown: which of them is repeated cannot be told. Not covered: weights split into parameters, whose products
are wider than the weight.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from megalowbit.layers.matmul.operand import MatmulOperand
from megalowbit.layers.matmul.use_counter import Use
from megalowbit.layers.recipe import Recipe


@runtime_checkable
class Observer(Protocol):
    """Receives the counts of each quantised operand."""

    def observe(self, layer: str, role: str, counts: Tensor, error: Tensor) -> None:
        """Take the counts of one tensor; called in training mode only, once for each quantisation.

        Args:
            layer: the layer's name in the model it was converted in.
            role: `"input"`, `"weight"` or `"grad_output"`.
            counts: int64 on the layer's device, one for each of `COUNT_NAMES`; the observer's to keep.
            error: float64 on the layer's device, one for each of `ERROR_NAMES`.
        """


@runtime_checkable
class Probe(Protocol):
    """Looks at the operands and products of one use of a layer, in training mode only."""

    def observe_operand(self, role: str, operand: Tensor) -> Tensor | None:
        """Take an operand as the layer got it, before it is quantised.

        Args:
            role: `"input"`, `"weight"` or `"grad_output"`.
            operand: (…, in_features), (out_features, in_features) or (…, out_features); this rank's shard of
                it in a tensor-parallel layer.

        Returns:
            Its largest magnitude (fp32, 0-dim, on the operand's device) where it was found on the way, which
            spares the quantiser its search; NaN or an infinity where the operand has one. `None`: not found.
        """

    def observe_product(
        self, product: str, left: MatmulOperand, right: MatmulOperand, result: Tensor, bias: Tensor | None
    ) -> None:
        """Take a product that has just been computed from the operands looked at.

        Args:
            product: `"output"`, `"grad_input"` or `"grad_weight"`.
            left: as it was multiplied: input; grad_output; grad_output (which the product transposes).
            right: as it was multiplied: weight (which the product transposes); weight; input.
            result: (rows, cols) of this rank alone, before tensor-parallel ranks sum it.
            bias: (cols,), which `result` of `"output"` contains; `None` where it contains none.
        """


@runtime_checkable
class Chooser(Protocol):
    """Says what the products of each layer run with."""

    def recipe(self, layer: str, base: Recipe) -> Recipe:
        """The recipe of a layer's products; the same within an optimizer step, and on all ranks.

        Args:
            layer: the layer's name in the model it was converted in.
            base: the layer's own recipe, from which the result may differ in the names of quantisers alone.
        """

    def probe(self, layer: str, use: Use) -> Probe | None:
        """Who looks at a use of a layer, or `None`; asked in training mode, never for repeated forwards."""
