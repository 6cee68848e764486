"""Makes `deepspeed.utils.safe_get_full_fp32_param` and related functions work at ZeRO stage 0.

These functions access a parameter's master, moments and gradient through methods that the optimizers of
stages 1 and 2 attach to it. Here every rank has the full parameter, so nothing is exchanged. As at the other
stages, gradients are multiplied by the loss scale, and a master that was set reaches the half-precision
weight at the next step. The attached methods hold the optimizer by a weak reference; copies and pickles of a
parameter have none.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from megalowbit.errors import UserError
from megalowbit.optim.optimizers.base import MegatronOptimizer

NOT_THERE = "Gradients are only available immediately after backward and before engine step"


def link_values(optimizer: MegatronOptimizer) -> None:
    """Attach the methods to all parameters that `optimizer` trains."""
    for name, parameter in optimizer.gradients.named():
        values = _Values(optimizer, name, parameter)
        parameter._hp_mapping = None  # DeepSpeed only checks that it exists
        for method in _Values.METHODS:
            setattr(parameter, method, getattr(values, method))


def unlink_values(optimizer: MegatronOptimizer) -> None:
    """Undo `link_values`."""
    for _, parameter in optimizer.gradients.named():
        for method in ("_hp_mapping", *_Values.METHODS):
            if hasattr(parameter, method):
                delattr(parameter, method)


class _Values:
    """Access to the values of one parameter; method names are DeepSpeed's."""

    METHODS = ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")

    def __init__(self, optimizer: MegatronOptimizer, name: str, parameter: torch.nn.Parameter) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._parameter = weakref.ref(parameter)
        self._name = name

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": _nothing, "_parameter": _nothing, "_name": self._name}

    def get_full_hp_param(self, optim_state_key: str | None = None) -> Tensor:
        """A copy of the master, or of one of the inner optimizer's states."""
        return self._live(optim_state_key).detach().clone()

    def set_full_hp_param(self, value: Tensor, optim_state_key: str | None = None) -> None:
        """Write the master, or one of the inner optimizer's states."""
        target = self._live(optim_state_key)
        self._check(value)
        with torch.no_grad():
            target.copy_(value)

    def get_full_hp_grad(self) -> Tensor:
        """A copy of the gradient; DeepSpeed calls it only if `.grad` is None."""
        optimizer, parameter = self._both()
        if not optimizer.gradients.exist():
            raise ValueError(NOT_THERE)  # as at stages 1 and 2
        found = optimizer.gradients.of(parameter)
        assert found is not None
        return found.clone()

    def set_full_hp_grad(self, value: Tensor) -> None:
        """Set the gradient; DeepSpeed calls it only if `.grad` is None."""
        _, parameter = self._both()
        self._check(value)
        parameter.grad = value.detach().to(parameter.device, torch.float32, copy=True)

    def _live(self, key: str | None) -> Tensor:
        optimizer, parameter = self._both()
        if key is None:
            return optimizer.master_of(parameter)
        value = optimizer.state_of(parameter).get(key)
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            raise UserError(
                f"the optimizer has no state {key!r} for {self._name}: states exist after the first step"
            )
        return value

    def _check(self, value: Tensor) -> None:
        _, parameter = self._both()
        if value.shape != parameter.shape:
            raise UserError(
                f"{self._name} has shape {tuple(parameter.shape)}, not {tuple(value.shape)}: pass a value "
                "for the full parameter"
            )

    def _both(self) -> tuple[MegatronOptimizer, torch.nn.Parameter]:
        optimizer, parameter = self._optimizer(), self._parameter()
        if optimizer is None or parameter is None:
            raise UserError(
                f"the engine of {self._name} no longer exists, so its fp32 values are gone: keep the engine"
            )
        return optimizer, parameter


def _nothing() -> None:
    """Stands for the weak reference in a copy or pickle."""
