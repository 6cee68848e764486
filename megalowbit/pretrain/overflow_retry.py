"""Runs a step's micro-batches, and repeats them at a lower loss scale after an overflow.

`run.overflow_retries` limits the repetitions. The batches are kept in memory only if retries are enabled. The
records describe the last attempt of a step: saturation counts of earlier attempts are dropped, and so are the
infinite gradients that speculation sampled in them. The step's duration includes all attempts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch

from megalowbit.engine.overflow_retry import retry_engine_step
from megalowbit.optim.gradients.report import StepReport
from megalowbit.pretrain.job import Job
from megalowbit.pretrain.records.lines import skip_line


@dataclass(frozen=True, kw_only=True)
class TakenStep:
    """The last attempt of a step, and a summary of earlier attempts.

    Attributes:
        loss: mean over this rank's micro-batches, 0-dim float64 on the engine's device.
        retries: number of earlier attempts.
        overflows: a line for each earlier attempt that names what overflowed.
    """

    loss: torch.Tensor
    retries: int = 0
    overflows: tuple[str, ...] = ()


def take_step(job: Job) -> TakenStep:
    """Forward, backward and optimizer step over the next micro-batches; every rank must call it."""
    max_retries = job.config.settings.run.overflow_retries
    batches = (_next_batch(job) for _ in range(job.accumulation_steps))
    if not max_retries:
        return TakenStep(loss=_attempt(job, batches))
    kept = list(batches)
    reports: list[StepReport] = []

    def attempt() -> torch.Tensor:
        loss = _attempt(job, kept)
        reports.append(job.engine.optimizer.report)
        return loss

    loss, retries = retry_engine_step(job.engine, attempt, max_retries=max_retries)
    lines = (
        skip_line(job.step + 1, report, following.loss_scale, verb="overflowed")
        for report, following in pairwise(reports)
    )
    return TakenStep(loss=loss, retries=retries, overflows=tuple(filter(None, lines)))


def _next_batch(job: Job) -> dict[str, torch.Tensor]:
    with job.phase("data"):
        return next(job.loader)


def _attempt(job: Job, batches: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Make one attempt; returns the loss as in `TakenStep`."""
    engine = job.engine
    loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    for component in job.components:
        component.begin_attempt()
    if job.is_pipeline:
        # list() reads all batches: middle stages use none, but their data position must advance as well
        micro_batches = list(batches)
        with job.phase("pipeline"):
            engine.train_batch(iter(micro_batches))
        job.weights_have_changed()
        loss_of_all: torch.Tensor = engine.dp_group_loss.double()
        return loss_of_all
    for batch in batches:
        with job.phase("forward"):
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        with job.phase("backward"):
            engine.backward(loss)
        with job.phase("optimizer step"):  # only after the last micro-batch; reduces gradients first
            engine.step()
        loss_sum += loss.detach()
    job.weights_have_changed()
    return loss_sum / job.accumulation_steps
