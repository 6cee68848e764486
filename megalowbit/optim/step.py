"""The order of one step, whichever optimizer takes it, with one late read by the host.

Everything up to the masters is launched on the device without knowing whether gradients overflowed: norm,
flag, clip factor, and an update that skips itself where the flag is set. Then the host reads flag, norm and
figures in one packet. Only a flag costs more: squares may have overflowed where gradients had not, so that
all is measured again in float64 before a step is given up; and the ranks tell each other where it happened.
Optimizers that cannot skip by themselves (ZeRO's, and inner ones that torch does not fuse) have the packet
read before their update.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist

from megalowbit.distributed import process_group
from megalowbit.optim.gradients.norm import GradientFacts, Measurement
from megalowbit.optim.gradients.report import Overflow, StepReport
from megalowbit.optim.instruments import Instruments, adapt
from megalowbit.optim.loss_scale.base import GradScaler


class Steppable(Protocol):
    """What an optimizer does in a step; `take_step` calls the methods in this order."""

    @property
    def grad_scaler(self) -> GradScaler | None:
        """Whose scale the gradients are multiplied by; None: 1."""

    @property
    def all_instruments(self) -> Sequence[Instruments]:
        """Those of each optimizer that is stepped here."""

    @property
    def training_group(self) -> dist.ProcessGroup | None:
        """All ranks that take the step together; None: this process alone."""

    @property
    def is_flag_shared(self) -> bool:
        """Whether `measure` comes to one norm and flag on all ranks of `training_group`."""

    @property
    def is_late_flag_possible(self) -> bool:
        """Whether `update` may be launched before the host knows if gradients overflowed."""

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """A timer of "inspect" or "update", where somebody wants to know."""

    def begin_step(self, loss_scale: float) -> None:
        """Make the gradients, which are multiplied by `loss_scale`, ready to be measured."""

    def measure(self, *, is_exact: bool) -> Measurement:
        """Look at the scaled gradients without reading the device; collective.

        `is_exact`: in float64, where squares of finite gradients may be too large for fp32.
        """

    def update(self, measured: Measurement, facts: GradientFacts | None) -> None:
        """Unscale and clip the gradients, step the weights.

        Args:
            measured: by `measure`.
            facts: the same, read by the host, of gradients that are finite. None: not read yet, and nothing
                may change where the flag is set.
        """

    def locate(self) -> Overflow | None:
        """Where gradients overflowed; collective, reads the device."""

    def end_step(self, report: StepReport) -> None:
        """Keep the report, and forget the gradients: one that stayed would be applied a second time."""


@torch.no_grad()
def take_step(optimizer: Steppable, closure: object = None) -> StepReport:
    """Apply the gathered gradients, or none of them if any is not finite; collective.

    `closure` is in torch's signature of `step`, and is refused.
    """
    if closure is not None:
        raise TypeError("step takes no closure: call backward first")
    grad_scaler, instruments = optimizer.grad_scaler, optimizer.all_instruments
    loss_scale = grad_scaler.scale if grad_scaler is not None else 1.0
    optimizer.begin_step(loss_scale)
    with optimizer.timed("inspect"):
        measured = _measure(optimizer, is_exact=False)
        figures = [each.take(optimizer.training_group) for each in instruments]
    is_late = optimizer.is_late_flag_possible
    if is_late:
        _update(optimizer, measured, None)
    facts, numbers = measured.read(figures)
    is_applied = is_late and not facts.found_inf
    if facts.found_inf:  # rare: was it only a square that fp32 does not hold?
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
    )
    optimizer.end_step(report)
    adapt(instruments, grad_scaler, numbers, is_applied=is_applied, loss_scale=loss_scale)
    return report


def _measure(optimizer: Steppable, *, is_exact: bool) -> Measurement:
    measured, group = optimizer.measure(is_exact=is_exact), optimizer.training_group
    if group is None or process_group.world_size(group) == 1 or optimizer.is_flag_shared:
        return measured
    # all ranks skip together, and clip what they hold alike by one norm; neither is ever NaN
    packet = torch.stack([measured.flag, torch.where(measured.flag > 0, 0.0, measured.norm)])
    dist.all_reduce(packet, op=dist.ReduceOp.MAX, group=group)
    flag, norm = packet.unbind()
    return Measurement(norm=norm, flag=flag, zeros=measured.zeros)


def _update(optimizer: Steppable, measured: Measurement, facts: GradientFacts | None) -> None:
    with optimizer.timed("update"):
        optimizer.update(measured, facts)
