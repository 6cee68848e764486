"""What the optimizer's report of a step means to the records: facts, and a line where a step was skipped."""

from __future__ import annotations

from megalowbit.optim.gradients.report import StepReport
from megalowbit.optim.optimizers.base import MegatronOptimizer
from megalowbit.telemetry.columns import scale_text
from megalowbit.telemetry.facts import Fact, Facts


def optimizer_facts(optimizer: MegatronOptimizer, report: StepReport) -> Facts:
    """Facts of a step that has been taken; those nobody asked for are left out.

    `skipped/tensor` and `skipped/rank` name the first gradient that was not finite; only skipped steps have
    them. `milliseconds/…` are means of the phases that the device has finished since the last step.
    """
    facts: dict[str, Fact] = {"grad_norm": report.grad_norm, "loss_scale": report.loss_scale}
    if optimizer.log_num_zeros_in_grad:
        facts["num_zeros"] = report.num_zeros
    if report.overflow is not None:
        facts["skipped/tensor"] = report.overflow.tensor
        facts["skipped/rank"] = report.overflow.rank
    if optimizer.layer_scaling is not None:
        facts["largest_layer_factor"] = max(optimizer.layer_scaling.factors.values(), default=1.0)
    if optimizer.timers is not None:
        facts |= {f"milliseconds/{phase}": value for phase, value in optimizer.timers.milliseconds().items()}
    return facts


def skip_line(step: int, report: StepReport, loss_scale: float, *, verb: str = "skipped") -> str | None:
    """`step 7 skipped: overflow in … on rank 5; loss scale 2^16 → 2^15`; None if it was applied.

    Args:
        step: counted from 1.
        report: of that step, or of one try of it.
        loss_scale: of the next one.
        verb: what happened to it.
    """
    if report.is_applied:
        return None
    where = str(report.overflow) if report.overflow is not None else "gradients were not finite"
    change = ""
    if loss_scale != report.loss_scale:
        change = f"; loss scale {scale_text(report.loss_scale)} → {scale_text(loss_scale)}"
    return f"step {step} {verb}: {where}{change}"
