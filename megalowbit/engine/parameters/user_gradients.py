"""Gives what users do with gradients the same meaning at every ZeRO stage: `zero_grad`, `.grad`, backwards.

At stages 1 to 3 DeepSpeed does not keep reduced gradients in `.grad`, so its `zero_grad` does not clear them,
and it never reads a `.grad` set after backward. Here `engine.zero_grad()` and `engine.module.zero_grad()`
also clear the optimizer's gradients, and a `.grad` set by the user is copied to where the stage keeps its
pieces.

`engine.scale(loss).backward()` divides by the micro-batches of a step once, as `engine.backward(loss)` does.
DeepSpeed divides at every output of the forward that the backward passes. So a loss of detached outputs is
not divided: the backward that continues at the outputs is. And where a model returns its loss and the logits
that the loss is computed from, DeepSpeed would divide twice; such a backward without `engine.scale` is an
error.

Not covered at stages 1 to 3:

- `zero_grad` of a part of the model, and `.grad = None` on one parameter: neither can be detected.
- a `.grad` set before a further backward of the same step: it is added to the sums, while stage 0 replaces
  them.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalowbit.errors import UserError

OUTPUT = "megalowbit.output"
NO_GRADIENTS = "engine.step() before any backward: call engine.backward(loss) first"
DIVIDED_TWICE = (
    "a backward of an output computed from another output would divide gradients by "
    "gradient_accumulation_steps more than once: call engine.backward(loss), or engine.scale(loss).backward()"
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
        self._parameters = {id(parameter) for parameter in engine.module.parameters()}
        self._scaled_task = self._divided_task = -1  # autograd's ids of the last such backwards
        self._divided_nodes: list[Any] = []  # autograd's nodes at which the backward has divided
        self._divided: Tensor | None = None  # the gradient divided last

    def mark(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        """A forward hook of the engine, which marks autograd's nodes of the outputs."""
        if torch._C._current_graph_task_id() == -1:
            self._forget()  # of a backward that has failed
        if self._engine.gradient_accumulation_steps() > 1:
            _mark(output)

    def scale(self, loss: Tensor) -> Tensor:
        """Replaces `engine.scale`: multiplies by the loss scale, divides by the micro-batches of a step.

        A loss of detached outputs is not divided here, as the backward of the outputs divides.
        """
        scaled: Tensor = self._scale(loss)
        if self._engine.gradient_accumulation_steps() > 1 and _reaches([loss.grad_fn], self._is_of_model):
            scaled = scaled / self._engine.gradient_accumulation_steps()
            scaled.register_hook(self._note)
        return scaled

    def divide(self, gradient: Tensor | None) -> Tensor | None:
        """Called by DeepSpeed in backward, with the gradient of each output of the forward.

        Raises:
            UserError: this backward has divided at another output already, which is computed from this one.
        """
        task = torch._C._current_graph_task_id()
        if gradient is None or task == self._scaled_task or self._engine.gradient_accumulation_steps() == 1:
            return gradient
        if task == self._divided_task and gradient is self._divided:  # a tensor that is returned twice
            return gradient
        divided: Tensor = self._divide(gradient)
        if divided is not gradient:  # it is in `engine.backward`
            self._note_divided(task, divided)
        return divided

    def _note_divided(self, task: int, divided: Tensor) -> None:
        """Keep where this backward has divided; refuse a second division of the same gradient."""
        node = torch._C._current_autograd_node()
        if task != self._divided_task:
            self._forget()
            torch.autograd.Variable._execution_engine.queue_callback(self._forget)  # when backward ends
        later = [each for one in self._divided_nodes for each, _ in one.next_functions]
        if _reaches(later, lambda each: each is node):
            raise UserError(DIVIDED_TWICE)
        self._divided_task, self._divided = task, divided
        self._divided_nodes.append(node)

    def _forget(self) -> None:
        self._divided_task, self._divided, self._divided_nodes = -1, None, []

    def _note(self, _: Tensor) -> None:
        self._scaled_task = torch._C._current_graph_task_id()

    def _is_of_model(self, node: Any) -> bool:
        """Whether a node of autograd is an output's, or a parameter's, as in a call of the module itself."""
        return OUTPUT in node.metadata or id(getattr(node, "variable", None)) in self._parameters


def _mark(output: Any) -> None:
    """Mark the outputs at which DeepSpeed divides: tensors, also in lists, tuples and dicts."""
    if isinstance(output, Tensor):
        if output.grad_fn is not None:
            node: Any = output.grad_fn
            node.metadata[OUTPUT] = True
    elif isinstance(output, (list, tuple, dict)):
        for each in output.values() if isinstance(output, dict) else output:
            _mark(each)


def _reaches(nodes: Iterable[Any], is_wanted: Callable[[Any], bool]) -> bool:
    """Whether a backward from `nodes` of autograd passes a wanted one; the nearest are tried first."""
    waiting, seen = deque(nodes), {None}
    while waiting:
        node = waiting.popleft()
        if node in seen:
            continue
        if is_wanted(node):
            return True
        seen.add(node)
        waiting.extend(each for each, _ in node.next_functions)
    return False


def attach_direct_backward(engine: Any) -> None:
    """Correct backwards without `engine.backward`, and refuse sums in half precision."""
    direct = DirectBackward(engine)
    engine.scale, engine._backward_prologue_per_tensor = direct.scale, direct.divide
    engine.register_forward_hook(direct.mark)  # of the engine: its module may be compiled, with its hooks
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
