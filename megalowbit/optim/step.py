"""The order of one optimizer step, with one deferred host read.

Everything up to the master weights is launched on the device before the host knows whether gradients
overflowed: norm, flag, clip factor, and an update that skips itself if the flag is set. Then the host reads
flag, norm and statistics in one copy, together with the numbers of a caller (`also_read`), such as the loss.
More is needed only if the flag is set:

- Squares may have overflowed although the gradients did not, so the gradients are measured again in float64
  before the step is skipped.
- The ranks exchange where the overflow happened.

Optimizers that cannot skip on the device (ZeRO's, and inner optimizers without a fused implementation) read
the flag before their update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist

from megalowbit.distributed import collectives, process_group
from megalowbit.errors import UserError
from megalowbit.optim.gradients.norm import GradientFacts, Measurement, clip_coefficient
from megalowbit.optim.gradients.report import Overflow, StepReport
from megalowbit.optim.gradients.step_gradients import StepGradients
from megalowbit.optim.instruments import Instruments, adapt
from megalowbit.optim.loss_scale.base import GradScaler


class Steppable(Protocol):
    """The parts of a step that an optimizer implements; `take_step` calls the methods in this order."""

    @property
    def grad_scaler(self) -> GradScaler | None:
        """The scaler of the gradients; None: they are not scaled."""

    @property
    def all_instruments(self) -> Sequence[Instruments]:
        """The instruments of each optimizer that is stepped here."""

    @property
    def training_group(self) -> dist.ProcessGroup | None:
        """All ranks that take the step together; None: this process only."""

    @property
    def is_flag_shared(self) -> bool:
        """Whether `measure` returns the same norm and flag on all ranks of `training_group`."""

    @property
    def also_read(self) -> Callable[[], torch.Tensor] | None:
        """Numbers of the caller to read together with the step's; see `LastStep`."""

    @property
    def can_defer_host_read(self) -> bool:
        """Whether `update` can be launched before the host knows whether gradients overflowed."""

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """A timer of "inspect" or "update", or a null context."""

    def begin_step(self, loss_scale: float) -> None:
        """Prepare the gradients, which are multiplied by `loss_scale`, to be measured."""

    def measure(self, *, is_exact: bool) -> Measurement:
        """Measure the scaled gradients without a host read; collective.

        `is_exact`: use float64, because squares of finite gradients may be too large for fp32.
        """

    def update(self, measured: Measurement, facts: GradientFacts | None) -> None:
        """Unscale and clip the gradients, and update the weights.

        Args:
            measured: the result of `measure`.
            facts: the same, read by the host, for finite gradients. None: not read yet; then nothing may
                change if the flag is set.
        """

    def locate(self) -> Overflow | None:
        """Locate overflowed gradients; collective, reads the device."""

    def end_step(self, report: StepReport) -> None:
        """Store the report and clear the gradients, which would otherwise be applied a second time."""


@torch.no_grad()
def take_step(optimizer: Steppable, closure: object = None) -> StepReport:
    """Apply the accumulated gradients, or skip the step if any is not finite; collective.

    `closure` exists because torch's `step` has one; it is rejected.
    """
    if closure is not None:
        raise TypeError("step takes no closure: call backward first")
    grad_scaler, instruments = optimizer.grad_scaler, optimizer.all_instruments
    loss_scale = grad_scaler.scale if grad_scaler is not None else 1.0
    optimizer.begin_step(loss_scale)
    with optimizer.timed("inspect"):
        measured = _measure(optimizer, is_exact=False)
        figures = [each.take(optimizer.training_group) for each in instruments]
    is_deferred = optimizer.can_defer_host_read
    if is_deferred:
        _update(optimizer, measured, None)
    also_read = [] if optimizer.also_read is None else [optimizer.also_read()]
    facts, (*numbers, others) = measured.read([*figures, also_read])
    is_applied = is_deferred and not facts.found_inf
    if facts.found_inf:  # rare: check in float64 whether only a square exceeded fp32
        measured = _measure(optimizer, is_exact=True)
        facts, _ = measured.read()
    if not facts.found_inf and not is_applied:
        _update(optimizer, measured, facts)
        is_applied = True
    report = StepReport(
        is_applied=is_applied,
        grad_norm=facts.norm / loss_scale,
        num_zeros=facts.num_zeros,
        loss_scale=loss_scale,
        overflow=None if is_applied else optimizer.locate(),
        also_read=tuple(others),
    )
    optimizer.end_step(report)
    adapt(instruments, grad_scaler, numbers, is_applied=is_applied, loss_scale=loss_scale)
    return report


@torch.no_grad()
def clip_grad_norm(optimizer: Steppable, each: Sequence[StepGradients], clip_grad: float) -> float:
    """Scale gradients down between backward and step; collective, reads the device.

    Args:
        optimizer: the coming step's.
        each: the gradients of all that it steps.
        clip_grad: the largest norm that they keep, without the loss scale.

    Returns:
        The norm before, without the loss scale; inf if a gradient is not finite. Gradients then stay as they
        are, so the step is skipped.

    Raises:
        UserError: `clip_grad` is not a positive number.
    """
    if not 0 < clip_grad < math.inf:
        raise UserError(f"clip_grad_norm({clip_grad}): the largest norm must be positive and finite")
    for gradients in each:
        gradients.check_factors()
        gradients.collect()
    measured = _measure(optimizer, is_exact=False)
    facts, _ = measured.read()
    if facts.found_inf:  # as in a step
        measured = _measure(optimizer, is_exact=True)
        facts, _ = measured.read()
    if facts.found_inf:
        return math.inf
    loss_scale = 1.0 if optimizer.grad_scaler is None else optimizer.grad_scaler.scale
    coefficient = clip_coefficient(clip_grad, measured.norm / loss_scale)
    for gradients in each:
        gradients.multiply(coefficient)
    return facts.norm / loss_scale


def _measure(optimizer: Steppable, *, is_exact: bool) -> Measurement:
    measured, group = optimizer.measure(is_exact=is_exact), optimizer.training_group
    if group is None or process_group.world_size(group) == 1 or optimizer.is_flag_shared:
        return measured
    # All ranks skip together, and clip shared parameters by the same norm. Neither value is ever NaN.
    packet = torch.stack([measured.flag, torch.where(measured.flag > 0, 0.0, measured.norm)])
    collectives.all_reduce(packet, op=dist.ReduceOp.MAX, group=group)
    flag, norm = packet.unbind()
    return Measurement(norm=norm, flag=flag, zeros=measured.zeros)


def _update(optimizer: Steppable, measured: Measurement, facts: GradientFacts | None) -> None:
    with optimizer.timed("update"):
        optimizer.update(measured, facts)
