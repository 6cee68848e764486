"""Gradients whose own derivatives are an error.

A backward that is not differentiable has to say so when somebody differentiates it (`create_graph=True`).
torch's `once_differentiable` says so only if the gradient that arrives requires a gradient itself. If it does
not, as for a loss, the result counts as a constant, and a penalty on it is lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalowbit.errors import UserError


class _DifferentiableOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, error: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.error = error
        return tuple(None if each is None else each.detach() for each in tensors[-count:])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise UserError(ctx.error)


def differentiable_once(
    ctx: Any, grad_output: Tensor | None, compute: Callable[[], Sequence[Tensor | None]], error: str
) -> tuple[Tensor | None, ...]:
    """The gradients that a function's backward returns; their derivatives are an error, not 0.

    They depend on grad_output and the forward's inputs. Leaves among these are found in the graph; the anchor
    covers the others if a second backward goes to all leaves.

    Args:
        ctx: the node of the graph, which a backward gets.
        grad_output: what it gets as well.
        compute: computes the gradients; runs without recording a graph.
        error: the message of the `UserError` that a second derivative raises.
    """
    if not torch.is_grad_enabled():
        return tuple(compute())
    with torch.no_grad():  # create_graph=True
        gradients = compute()
    leaves = [getattr(node, "variable", None) for node, _ in ctx.next_functions]
    anchor = torch.zeros((), requires_grad=True)
    arguments = anchor, grad_output, *leaves, *gradients
    return tuple(_DifferentiableOnce.apply(error, len(gradients), *arguments))
