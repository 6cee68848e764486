"""The slot through which a layer hands out what quantisation did to its operands.

Telemetry implements it; layers only know this protocol, and an empty slot costs nothing.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


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
