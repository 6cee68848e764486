"""Several optimizers that step as one: one loss scale, one overflow flag, one norm to clip by.

For models whose parameters need different treatment, such as experts that other ranks do not hold. Each
optimizer reduces its gradients' norm over a group of its own; an overflow anywhere skips all of them. Giving
each a scaler of its own, as Megatron-Core does, lets their scales drift apart although one loss was
multiplied by one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalowbit.errors import UserError
from megalowbit.optim.grad_scaler import GradScaler
from megalowbit.optim.optimizer_state import REMEDY
from megalowbit.optim.optimizer_step import MegatronOptimizer
from megalowbit.optim.step_report import StepReport
from megalowbit.optim.take_step import take_step

SHARED_SETTINGS = ("clip_grad", "gradient_norm", "log_num_zeros_in_grad", "training_group")


class ChainedOptimizer:
    """A sequence of optimizers that apply a step all together or not at all.

    Args:
        optimizers: with the same scaler object, clipping, norm and training group, and no parameter twice.

    Attributes:
        chained_optimizers: in the order given.
        report: what the last step did; None before the first.

    Raises:
        UserError: there are none, their settings differ, or they reduce over different groups and have no
            training group over which all ranks could agree to skip.
    """

    def __init__(self, optimizers: Sequence[MegatronOptimizer]) -> None:
        if not optimizers:
            raise UserError("ChainedOptimizer needs at least one optimizer")
        self.chained_optimizers = list(optimizers)
        lead = self.chained_optimizers[0]
        for other in self.chained_optimizers[1:]:
            if other.grad_scaler is not lead.grad_scaler:
                raise UserError("chained optimizers have different grad scalers: pass one object to all")
            for name in SHARED_SETTINGS:
                if getattr(other, name) != getattr(lead, name):
                    raise UserError(
                        f"chained optimizers differ in {name}: {getattr(lead, name)!r} and "
                        f"{getattr(other, name)!r}; give them the same"
                    )
            if lead.training_group is None and other.model_parallel_group is not lead.model_parallel_group:
                raise UserError(
                    "chained optimizers reduce over different groups: pass training_group, all ranks that "
                    "take each step together, so that all of them skip together"
                )
        parameters = [
            id(p) for each in self.chained_optimizers for g in each.param_groups for p in g["params"]
        ]
        if len(set(parameters)) < len(parameters):
            raise UserError("a parameter is in two of the chained optimizers: give it to one of them")

    @property
    def grad_scaler(self) -> GradScaler | None:
        """The one scaler."""
        return self.chained_optimizers[0].grad_scaler

    @property
    def loss_scale(self) -> float:
        """S by which the loss of the coming backward is multiplied; 1 without a scaler."""
        return self.chained_optimizers[0].loss_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, in order; a learning rate written to one of them is used."""
        return [group for each in self.chained_optimizers for group in each.param_groups]

    @property
    def report(self) -> StepReport | None:
        """What the last step did; None before the first."""
        return self.chained_optimizers[0].report

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by S, in fp32."""
        return self.chained_optimizers[0].scale_loss(loss)

    def step(self) -> StepReport:
        """Apply all gradients, or none if any is infinite or NaN; see `MegatronOptimizer.step`."""
        return take_step(self.chained_optimizers, self.grad_scaler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all."""
        for each in self.chained_optimizers:
            each.zero_grad(set_to_none)

    def reload_model_params(self) -> None:
        """Take the masters of all from the model."""
        for each in self.chained_optimizers:
            each.reload_model_params()

    def state_dict(self) -> list[dict[str, Any]]:
        """The states of all, in order."""
        return [each.state_dict() for each in self.chained_optimizers]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from saved states.

        Raises:
            UserError: their number, or what they hold, does not fit.
        """
        if len(states) != len(self.chained_optimizers):
            raise UserError(
                f"the state is of {len(states)} chained optimizers, here are {len(self.chained_optimizers)}: "
                f"{REMEDY}"
            )
        for each, state in zip(self.chained_optimizers, states, strict=True):
            each.load_state_dict(state)
