"""The order of one step, for one optimizer or several under one scaler, with one late read by the host.

Everything up to the masters is launched on the device without knowing whether gradients overflowed: norm,
flag, clip factor, and an update that skips itself where the flag is set. Then the host reads flag, norm and
figures in one packet. Only a flag costs more: squares may have overflowed where gradients had not, so that
all is measured again in float64 before a step is given up; and the ranks tell each other where it happened.
Inner optimizers that cannot skip by themselves have the packet read before their update.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megalowbit.distributed import process_group
from megalowbit.optim.gradients.norm import clip_coefficient
from megalowbit.optim.gradients.overflow import joined, locate_overflow
from megalowbit.optim.gradients.report import Overflow, StepReport
from megalowbit.optim.instruments import joined_statistics
from megalowbit.optim.loss_scale.base import GradScaler
from megalowbit.optim.statistics.layer_scaling import LayerScaling
from megalowbit.optim.timers import timed

if TYPE_CHECKING:
    from megalowbit.optim.optimizers.base import MegatronOptimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Measured:
    """0-dim float64 on the device: norm of the scaled gradients, flag (> 0: not finite), zeros."""

    norm: torch.Tensor
    flag: torch.Tensor
    zeros: torch.Tensor


@torch.no_grad()
def take_step(optimizers: Sequence[MegatronOptimizer], grad_scaler: GradScaler | None) -> StepReport:
    """Step all `optimizers`, or none of them; collective over their groups.

    Args:
        optimizers: with one clipping norm over all of their gradients. The first one's training group and
            timers serve all.
        grad_scaler: the one that all of them have.
    """
    lead = optimizers[0]
    loss_scale = grad_scaler.scale if grad_scaler is not None else 1.0
    for optimizer in optimizers:
        optimizer.begin_step(loss_scale)
    with timed(lead.timers, "inspect"):
        measured = _measure(optimizers, is_exact=False)
        figures = [each.instruments.take(lead.training_group) for each in optimizers]
    is_late = all(optimizer.is_late_flag_possible for optimizer in optimizers)
    if is_late:
        _update(optimizers, measured, loss_scale, has_flag=True)
    norm, flag, zeros, *numbers = _read(measured, list(chain(*figures)))
    is_applied = is_late and flag == 0
    if flag > 0:  # rare: was it only a square that fp32 does not hold?
        measured = _measure(optimizers, is_exact=True)
        norm, flag, zeros = _read(measured, [])
    if flag == 0 and not is_applied:
        _update(optimizers, measured, loss_scale, has_flag=False)
        is_applied = True
    report = StepReport(
        is_applied=is_applied,
        grad_norm=norm / loss_scale,
        num_zeros=int(zeros) if lead.log_num_zeros_in_grad else None,
        loss_scale=loss_scale,
        overflow=None if is_applied else _locate(optimizers),
    )
    for optimizer in optimizers:
        optimizer.report = report
        optimizer.end_step(is_applied=is_applied)
    lengths = [sum(map(len, of_one)) for of_one in figures]
    told = _split(numbers, lengths)
    _adapt(optimizers, grad_scaler, told, is_applied=is_applied, loss_scale=loss_scale)
    return report


def _measure(optimizers: Sequence[MegatronOptimizer], *, is_exact: bool) -> _Measured:
    each = [optimizer.measure(is_exact=is_exact) for optimizer in optimizers]
    device = each[0].device
    norms, flags, zeros = torch.stack([one.to(device) for one in each]).unbind(1)
    norm = norms.sum() if optimizers[0].gradient_norm == "sum_of_norms" else norms.square().sum().sqrt()
    flag = flags.max()
    group = optimizers[0].training_group
    is_shared = len(optimizers) == 1 and optimizers[0].is_flag_shared
    if group is not None and process_group.world_size(group) > 1 and not is_shared:
        # all ranks skip together, and clip what they hold alike by one norm; neither is ever NaN
        packet = torch.stack([flag, torch.where(flag > 0, 0.0, norm)])
        dist.all_reduce(packet, op=dist.ReduceOp.MAX, group=group)
        flag, norm = packet.unbind()
    return _Measured(norm, flag, zeros.sum())


def _update(
    optimizers: Sequence[MegatronOptimizer], measured: _Measured, loss_scale: float, *, has_flag: bool
) -> None:
    """Launch the update of each: unscaled, clipped and, with the flag, skipped on the device."""
    lead = optimizers[0]
    scale, flag = None, None
    if lead.clip_grad > 0:
        coefficient = clip_coefficient(lead.clip_grad, measured.norm / loss_scale)
        # an absurd norm must not make the factor 0 and an applied step of nothing
        scale = (loss_scale / coefficient).clamp(max=torch.finfo(torch.float32).max).float()
    elif loss_scale != 1.0:
        scale = torch.full_like(measured.norm, loss_scale, dtype=torch.float32)
    if has_flag:
        flag = (measured.flag > 0).float()  # fused optimizers want exactly 0 or 1
    with timed(lead.timers, "update"):
        for optimizer in optimizers:
            optimizer.update(scale, flag)


def _read(measured: _Measured, figures: Sequence[torch.Tensor]) -> list[float]:
    """The one host read of an applied step."""
    packet = torch.stack([measured.norm, measured.flag, measured.zeros])
    return torch.cat([packet, *(figure.to(packet.device) for figure in figures)]).tolist()


def _locate(optimizers: Sequence[MegatronOptimizer]) -> Overflow | None:
    """Where gradients overflowed: as they were before averaging, or else as they are. Collective."""
    for is_before in (True, False):
        seen = [optimizer.gradients.overflow_here(is_before=is_before) for optimizer in optimizers]
        found = locate_overflow(joined(seen), optimizers[0].training_group)
        if found is not None:
            return found
    return None


def _split(numbers: Sequence[float], lengths: Sequence[int]) -> list[Sequence[float]]:
    ends = list(accumulate(lengths, initial=0))
    return [numbers[start:end] for start, end in pairwise(ends)]


def _adapt(
    optimizers: Sequence[MegatronOptimizer],
    grad_scaler: GradScaler | None,
    numbers: Sequence[Sequence[float]],
    *,
    is_applied: bool,
    loss_scale: float,
) -> None:
    """Tell scaler and factors what came of the step; `numbers` are each optimizer's own figures."""
    statistics = []
    scalings: dict[LayerScaling, list[float]] = {}  # several optimizers may share one
    for optimizer, own in zip(optimizers, numbers, strict=True):
        seen, amaxes = optimizer.instruments.read(own, loss_scale)
        statistics.append(seen)
        scaling = optimizer.instruments.layer_scaling
        if scaling is not None:
            scalings[scaling] = list(map(max, amaxes, scalings.get(scaling, amaxes)))
    blamed = [scaling.update(amaxes, not is_applied, loss_scale) for scaling, amaxes in scalings.items()]
    if grad_scaler is not None and any(blamed):
        grad_scaler.restart_growth()
    elif grad_scaler is not None:
        grad_scaler.update(not is_applied, joined_statistics(statistics))
    for optimizer in optimizers:
        optimizer.instruments.prepare(grad_scaler)
