"""Gives `zero_grad` and assignments to `.grad` the same meaning at every ZeRO stage.

At stages 1 to 3 DeepSpeed does not keep reduced gradients in `.grad`, so its `zero_grad` does not clear them,
and it never reads a `.grad` set after backward. Here `engine.zero_grad()` and `engine.module.zero_grad()`
also clear the optimizer's gradients, and a `.grad` set by the user is copied to where the stage keeps its
pieces.

Not covered at stages 1 to 3:

- `zero_grad` of a part of the model, and `.grad = None` on one parameter: neither can be detected.
- a `.grad` set before a further backward of the same step: it is added to the sums, while stage 0 replaces
  them.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

NO_GRADIENTS = "engine.step() before any backward: call engine.backward(loss) first"


class ZeroGrad:
    """`zero_grad` of an engine's module, which also clears the optimizer's gradients.

    A copy of the module has the method of its class.
    """

    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        self._module, self._optimizer = module, weakref.ref(optimizer)

    def __call__(self, set_to_none: bool = True) -> None:
        type(self._module).zero_grad(self._module, set_to_none)
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.zero_grad()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(type(self._module).zero_grad, copy.deepcopy(self._module, memo))


def attach_zero_grad(engine: Any) -> None:
    """Make `engine.zero_grad()` and `engine.module.zero_grad()` clear all gradients since the last step."""
    engine.module.zero_grad = engine.zero_grad = ZeroGrad(engine.module, engine.optimizer)


def drop_from_host(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Drop `.grad`s on the host, for which stage 3's `zero_grad` would fail to find a stream."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.device.type == "cpu":
            parameter.grad = None


def piece_of(values: Tensor, *, size: int, rank: int) -> Tensor:
    """Piece `rank` of flattened `values` (numel,) as ZeRO 3 partitions them: (size,), padded with zeros."""
    piece = values.new_zeros(size)
    own = values[rank * size : (rank + 1) * size]
    piece[: own.numel()] = own
    return piece
