"""Several optimizers that step as one: one loss scale, one overflow flag, one norm for clipping.

For models whose parameters need different treatment, such as experts that other ranks do not hold. Each
optimizer reduces the norm of its gradients over its own group; an overflow anywhere skips the step of all.
With one scaler for each optimizer, as in Megatron-Core, the scales may drift apart although the loss was
multiplied by only one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.errors import UserError
from megalowbit.optim.gradients.norm import GradientFacts, Measurement
from megalowbit.optim.gradients.report import Overflow, StepReport
from megalowbit.optim.gradients.step_gradients import locate
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.loss_scale.base import GradScaler
from megalowbit.optim.optimizers.base import MegatronOptimizer, call_closure, no_later_parameters, not_copied
from megalowbit.optim.optimizers.options import SHARED
from megalowbit.optim.optimizers.saved_state import REMEDY, after_load, before_load, with_hooks
from megalowbit.optim.step import clip_grad_norm, take_step


class ChainedOptimizer(torch.optim.Optimizer):
    """A sequence of optimizers that either all apply a step or all skip it.

    A torch `Optimizer`, so any learning-rate scheduler accepts it.

    Args:
        optimizers: with the same scaler object, clipping, norm and training group, and no parameter twice.

    Attributes:
        chained_optimizers: in the order given.
        also_read: as in `LastStep`.

    Raises:
        UserError: there are none, or their settings differ.
    """

    def __init__(self, optimizers: Sequence[MegatronOptimizer]) -> None:
        if not optimizers:
            raise UserError("ChainedOptimizer needs at least one optimizer")
        lead = optimizers[0]
        for other in optimizers[1:]:
            if other.grad_scaler is not lead.grad_scaler:
                raise UserError("chained optimizers have different grad scalers: pass one object to all")
            for name in SHARED:
                if getattr(other, name) != getattr(lead, name):
                    raise UserError(
                        f"chained optimizers differ in {name}: {getattr(lead, name)!r} and "
                        f"{getattr(other, name)!r}; give them the same"
                    )
        groups = [group for each in optimizers for group in each.param_groups]
        parameters = [id(parameter) for each in optimizers for _, parameter in each.gradients.named()]
        if len(set(parameters)) < len(parameters):
            raise UserError("a parameter is in two of the chained optimizers: give it to one of them")
        self.chained_optimizers: list[MegatronOptimizer] = []
        super().__init__(groups, {})  # required by torch's hooks; what it stores is not used
        self.chained_optimizers = list(optimizers)
        self.also_read: Callable[[], torch.Tensor] | None = None  # see `LastStep`

    @property
    def grad_scaler(self) -> GradScaler | None:
        """The common scaler."""
        return self.chained_optimizers[0].grad_scaler

    @property
    def loss_scale(self) -> float:
        """S by which the loss of the coming backward is multiplied; 1 without a scaler."""
        return self.chained_optimizers[0].loss_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order; a learning rate written to a group takes effect."""
        if not self.chained_optimizers:
            return self._collected
        return [group for each in self.chained_optimizers for group in each.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._collected = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The states of all optimizers by master; a new mapping to the same objects."""
        merged: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for each in self.chained_optimizers:
            merged.update(each.state)
        return merged

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        pass  # torch's constructor sets a state, but each optimizer has its own

    @property
    def report(self) -> StepReport | None:
        """The last step's report; None before the first."""
        return self.chained_optimizers[0].report

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by S, in fp32."""
        return self.chained_optimizers[0].scale_loss(loss)

    def step(self, closure: Callable[[], float] | None = None) -> StepReport:  # type: ignore[override]
        """Apply all gradients, or none if any is infinite or NaN; see `MegatronOptimizer.step`."""
        call_closure(closure)
        return take_step(self)

    @property
    def all_instruments(self) -> Sequence[Instruments]:
        """See `Steppable`: the instruments of all optimizers."""
        return [each.instruments for each in self.chained_optimizers]

    @property
    def training_group(self) -> dist.ProcessGroup | None:
        """All ranks that take each step together; None for a single process."""
        return self.chained_optimizers[0].training_group

    @property
    def is_flag_shared(self) -> bool:
        """False for several optimizers, because each reduces over its own group."""
        return len(self.chained_optimizers) == 1 and self.chained_optimizers[0].is_flag_shared

    @property
    def can_defer_host_read(self) -> bool:
        """Whether all can skip on the device."""
        return all(each.can_defer_host_read for each in self.chained_optimizers)

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """The first optimizer's timers are used for all."""
        return self.chained_optimizers[0].timed(phase)

    def begin_step(self, loss_scale: float) -> None:
        """Prepare all gradients to be measured."""
        for each in self.chained_optimizers:
            each.begin_step(loss_scale)

    def measure(self, *, is_exact: bool = False) -> Measurement:
        """One norm over all gradients, on the first one's device; collective over the groups of all."""
        each = [optimizer.measure(is_exact=is_exact) for optimizer in self.chained_optimizers]
        each = [one.to(each[0].norm.device) for one in each]
        norms = torch.stack([one.norm for one in each])
        is_sum = self.chained_optimizers[0].gradient_norm == "sum_of_norms"
        zeros = [one.zeros for one in each if one.zeros is not None]
        return Measurement(
            norm=norms.sum() if is_sum else norms.square().sum().sqrt(),
            flag=torch.stack([one.flag for one in each]).max(),
            zeros=torch.stack(zeros).sum() if zeros else None,
        )

    def update(self, measured: Measurement, facts: GradientFacts | None) -> None:
        """Step all optimizers with one norm and flag."""
        for each in self.chained_optimizers:
            each.update(measured, facts)

    def locate(self) -> Overflow | None:
        """Locate overflowed gradients of any optimizer; collective over the training group."""
        return locate([each.gradients for each in self.chained_optimizers], self.training_group)

    def end_step(self, report: StepReport) -> None:
        """Clear all gradients."""
        for each in self.chained_optimizers:
            each.end_step(report)

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scale all gradients down by one norm; see `MegatronOptimizer.clip_grad_norm`."""
        return clip_grad_norm(self, [each.gradients for each in self.chained_optimizers], clip_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for each in self.chained_optimizers:
            each.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported after construction, see `MegatronOptimizer`.

        Raises:
            UserError: always, if called by a user.
        """
        if self.chained_optimizers:
            raise no_later_parameters()
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_copied(self)

    def reload_model_params(self) -> None:
        """Copy the model to the masters of all optimizers."""
        for each in self.chained_optimizers:
            each.reload_model_params()

    def state_dict(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The states of all optimizers, in order."""
        state: list[dict[str, Any]] = with_hooks(
            self, lambda: [each.state_dict() for each in self.chained_optimizers]
        )
        return state

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:  # type: ignore[override]
        """Continue from saved states.

        Raises:
            UserError: their number or contents do not fit; then nothing has changed.
        """
        states = before_load(self, states)
        if len(states) != len(self.chained_optimizers):
            raise UserError(
                f"the state has {len(states)} chained optimizers, but there are "
                f"{len(self.chained_optimizers)}: {REMEDY}"
            )
        pairs = zip(self.chained_optimizers, states, strict=True)
        checked = [(each, before_load(each, state)) for each, state in pairs]
        for each, state in checked:
            each.check_state_dict(state)
        for each, state in checked:
            each.load_checked(state)
        after_load(self)
