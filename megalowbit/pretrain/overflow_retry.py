"""The micro-batches of a step, once or, after an overflow, again at a lower scale (`run.overflow_retries`).

The step's batches are kept only where they may be needed again. What is recorded of a step is its last try:
counts of earlier ones are dropped, as is what speculation saw of their infinite gradients, and its seconds
are those of all.
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
    """The last try of a step, and the tries before it.

    Attributes:
        loss: 0-dim float64 on the engine's device, mean over this rank's micro-batches.
        retries: how many tries there were before.
        overflows: a line for each of these, naming what overflowed.
    """

    loss: torch.Tensor
    retries: int = 0
    overflows: tuple[str, ...] = ()


def take_step(job: Job) -> TakenStep:
    """Forward, backward and optimizer step over the micro-batches that come next; every rank must call it."""
    max_retries = job.config.settings.run.overflow_retries
    batches = (next(job.loader) for _ in range(job.accumulation_steps))
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


def _attempt(job: Job, batches: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
    """One try; the loss is as in `TakenStep`."""
    engine = job.engine
    loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    for component in job.components:
        component.begin_attempt()
    if job.is_pipeline:
        engine.train_batch(iter(list(batches)))  # all, so that middle stages move on in the data as well
        job.weights_have_changed()
        loss_of_all: torch.Tensor = engine.dp_group_loss.double()
        return loss_of_all
    for batch in batches:
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        loss_sum += loss.detach()
    job.weights_have_changed()
    return loss_sum / job.accumulation_steps
