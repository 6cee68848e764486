"""What is rejected where one backward computes plain gradients and nothing else is differentiated.

`create_graph=True` asks for gradients that can be differentiated. torch's `once_differentiable` rejects the
second backward, but only if that meets the node. Many do not: a gradient that arrives as a constant, or a
second backward to tensors behind an input that was computed. The gradient then counts as a constant, and a
penalty on it is lost without a word. So the first backward is rejected. A forward-mode derivative of an
output gradient would be lost in the same way. Transforms of `torch.func` and forward-mode derivatives are
rejected in the forward. In compiled code torch rejects a second backward that meets the compiled node; others
(to named tensors only) take its gradients for constants, because the codes that are saved lead to no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad

from megalowbit.errors import UserError


def reject_create_graph(who: str, remedy: str) -> None:
    """Call this first in a backward whose gradients have no derivatives.

    Raises:
        UserError: the caller wants a graph of the gradients.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # in a backward: create_graph
        raise UserError(f"second derivatives of {who} are not defined (create_graph=True): {remedy}")


def check_backward(gradient: Tensor | None, who: str, remedy: str) -> None:
    """Call this first in a backward that computes plain gradients of one output gradient.

    Raises:
        UserError: `gradient` is a batch of them or has a forward-mode derivative; the caller wants a graph.
    """
    reject_create_graph(who, remedy)
    if gradient is None or torch.compiler.is_compiling():
        return
    if is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient):
        raise UserError(
            f"{who} takes one output gradient at a time: call backward for each (without is_grads_batched, "
            f"vectorize or vmap), or {remedy}"
        )
    if has_tangent(lambda: [gradient]):
        raise UserError(f"{who} has no forward-mode derivatives: use backward(), or {remedy}")


def reject_transforms(tensors: Callable[[], Iterable[Tensor]], who: str, remedy: str) -> None:
    """Call this first in a forward whose derivatives are those of one backward; not while compiling.

    Raises:
        UserError: a transform of `torch.func` is active, or one of the tensors has a forward-mode derivative.
    """
    if peek_interpreter_stack() is not None:
        raise UserError(
            f"{who} cannot run inside torch.func.vmap, grad, jvp or another transform: use backward() for "
            f"gradients and a leading axis of the input for vmap, or {remedy}"
        )
    if has_tangent(tensors):
        raise UserError(f"{who} has no forward-mode derivatives: use backward(), or {remedy}")


def has_tangent(tensors: Callable[[], Iterable[Tensor]]) -> bool:
    """Whether one of the tensors has a forward-mode derivative; asks for them only where one could have."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors())
