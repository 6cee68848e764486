"""What users do to gradients between backward and step, with one meaning at every ZeRO stage.

DeepSpeed's `zero_grad`s drop `.grad`, in which stages 1 to 3 keep nothing once a backward is over: what they
have reduced stays and is added to. Here `engine.zero_grad()` and `engine.module.zero_grad()` ask the
optimizer to forget. And a `.grad` that someone sets after the backward, which those stages never read, is
written to where they keep their pieces. Not covered there: `zero_grad` of a part of the model, and
`.grad = None` of one parameter, both of which leave no trace; and a `.grad` that is set before a further
backward of the same step, which is added to the sums where stage 0 replaces them.
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
    """`zero_grad` of an engine's module: the module's own, and the optimizer forgets its sums.

    A copy of the module has the method of its class again.
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
    """Let `engine.zero_grad()` and `engine.module.zero_grad()` forget all gradients since the last step."""
    engine.module.zero_grad = engine.zero_grad = ZeroGrad(engine.module, engine.optimizer)


def drop_from_host(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Drop `.grad`s that lie on the host, for which stage 3's `zero_grad` asks in vain for a stream."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.device.type == "cpu":
            parameter.grad = None


def piece_of(values: Tensor, *, size: int, rank: int) -> Tensor:
    """Piece `rank` of flattened `values`, (numel,), as ZeRO 3 cuts them: (size,), padded with zeros."""
    piece = values.new_zeros(size)
    mine = values[rank * size : (rank + 1) * size]
    piece[: mine.numel()] = mine
    return piece
