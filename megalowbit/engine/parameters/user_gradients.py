"""Gives what users do with gradients the same meaning at every ZeRO stage: `zero_grad`, `.grad`, backwards.

At stages 1 to 3 DeepSpeed does not keep reduced gradients in `.grad`, so its `zero_grad` does not clear them,
and it never reads a `.grad` set after backward. Here `engine.zero_grad()` and `engine.module.zero_grad()`
also clear the optimizer's gradients, and a `.grad` set by the user is copied to where the stage keeps its
pieces.

`engine.scale(loss).backward()` divides by the micro-batches of a step once, as `engine.backward(loss)` does.
DeepSpeed divides at every tensor of the output that the backward passes, so twice where a model returns its
loss and its logits. A backward without `engine.scale` that passes two is an error. A loss on detached outputs
is not divided by `engine.scale`, because its gradients are when they are given to the outputs.

Not covered at stages 1 to 3:

- `zero_grad` of a part of the model, and `.grad = None` on one parameter: neither can be detected.
- a `.grad` set before a further backward of the same step: it is added to the sums, while stage 0 replaces
  them.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from megalowbit.errors import UserError

OUTPUT = "megalowbit.output"  # marks the nodes of autograd's graph that an engine's forward has returned
NO_GRADIENTS = "engine.step() before any backward: call engine.backward(loss) first"
DIVIDED_TWICE = (
    "a backward of several output tensors may divide gradients by gradient_accumulation_steps more than "
    "once, if one is computed from another: call engine.backward(loss), or engine.scale(loss).backward()"
)
HALF_SUMS = (
    "engine.coalesce_grad_reduction() would add gradients in half precision at ZeRO stage {}: leave it out, "
    "and call engine.backward several times, which adds in fp32"
)


class ZeroGrad:
    """`zero_grad` of an engine's module, which also clears the optimizer's gradients.

    A copy of the module has the method of its class.
    """

    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        self._module, self._optimizer = module, weakref.ref(optimizer)

    def __call__(self, set_to_none: bool = True) -> None:
        type(self._module).zero_grad(self._module, set_to_none)
        optimizer = self._optimizer()
        if optimizer is not None and not getattr(optimizer, "is_destroyed", False):
            optimizer.zero_grad()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(type(self._module).zero_grad, copy.deepcopy(self._module, memo))


def attach_zero_grad(engine: Any) -> None:
    """Make `engine.zero_grad()` and `engine.module.zero_grad()` clear all gradients since the last step."""
    engine.module.zero_grad = engine.zero_grad = ZeroGrad(engine.module, engine.optimizer)


class DirectBackward:
    """Makes backwards without `engine.backward` divide by the micro-batches of a step exactly once."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._scale, self._divide = engine, engine.scale, engine._backward_prologue_per_tensor
        self._scaled_task = self._divided_task = -1  # autograd's ids of the last such backwards

    def scale(self, loss: Tensor) -> Tensor:
        """Replaces `engine.scale`: multiplies by the loss scale, divides by the micro-batches of a step."""
        scaled: Tensor = self._scale(loss)
        if self._engine.gradient_accumulation_steps() > 1 and _reaches_output(scaled):
            scaled = scaled / self._engine.gradient_accumulation_steps()
            scaled.register_hook(self._note)
        return scaled

    def divide(self, gradient: Tensor | None) -> Tensor | None:
        """Called by DeepSpeed in backward, with the gradient of each output of the forward.

        Raises:
            UserError: this backward has divided at another output already.
        """
        task = torch._C._current_graph_task_id()
        if gradient is None or task == self._scaled_task or self._engine.gradient_accumulation_steps() == 1:
            return gradient
        divided: Tensor = self._divide(gradient)
        if divided is not gradient:  # it is in `engine.backward`
            if task == self._divided_task:
                raise UserError(DIVIDED_TWICE)
            self._divided_task = task
        return divided

    def _note(self, _: Tensor) -> None:
        self._scaled_task = torch._C._current_graph_task_id()


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a model's output that DeepSpeed divides at."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list | Mapping):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(each)


def _mark_outputs(_: torch.nn.Module, __: Any, output: Any) -> None:
    for each in _tensors(output):
        if each.grad_fn is not None:
            cast(dict[str, Any], each.grad_fn.metadata)[OUTPUT] = True


def _reaches_output(loss: Tensor) -> bool:
    """Whether the backward of a loss passes an output of the model; the search goes no further than those."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if OUTPUT in cast(dict[str, Any], node.metadata):
            return True
        seen.add(node)
        nodes.extend(each for each, _ in node.next_functions)
    return False


def attach_direct_backward(engine: Any) -> None:
    """Correct backwards without `engine.backward`, and refuse sums in half precision."""
    direct = DirectBackward(engine)
    engine.scale, engine._backward_prologue_per_tensor = direct.scale, direct.divide
    engine.register_forward_hook(_mark_outputs)  # not the module's, which may be compiled
    stage = engine.zero_optimization_stage()
    if stage >= 2 and any(parameter.dtype != torch.float32 for parameter in engine.module.parameters()):
        engine.coalesce_grad_reduction = partial(_refuse, HALF_SUMS.format(stage))


def _refuse(message: str) -> None:
    raise UserError(message)


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
