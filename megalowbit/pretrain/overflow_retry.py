"""Runs a step's micro-batches, and repeats them at a lower loss scale after an overflow.

`run.overflow_retries` limits the repetitions. The batches are kept in memory only if retries are enabled. The
records describe the last attempt of a step: saturation counts of earlier attempts are dropped, and so are the
infinite gradients that speculation sampled in them. The step's duration includes all attempts.

Where samples have different numbers of labels, a step has them counted first, over all ranks. The loss of a
micro-batch is then its sum over their mean number, so that the means over micro-batches and ranks are that of
all labels.

A step reads the device once: the optimizer reads loss and counts with its own numbers. In a pipeline only the
last stage has a loss; the all-reduce of the facts brings it to the others before they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch

from megalowbit.distributed import collectives, process_group
from megalowbit.engine.overflow_retry import retry_engine_step
from megalowbit.engine.pipeline.batch_reader import loss_of_step, loss_per_label, losses_of_rows
from megalowbit.hf.batches.separate_documents import attention_within_documents
from megalowbit.hf.batches.upload import upload
from megalowbit.hf.losses import token_losses
from megalowbit.labels import count_labels
from megalowbit.optim.gradients.report import StepReport
from megalowbit.pretrain.components.source_losses import SOURCES
from megalowbit.pretrain.job import Job
from megalowbit.pretrain.records.lines import skip_line
from megalowbit.pretrain.stopping.signals import pending_stop_signal
from megalowbit.telemetry.step_facts import PendingFacts

Batch = dict[str, torch.Tensor]
Attempt = tuple[PendingFacts, Sequence[float]]  # the facts of a step, and their numbers on the host


@dataclass(frozen=True, kw_only=True)
class TakenStep:
    """The last attempt of a step, and a summary of earlier attempts.

    Attributes:
        facts: the step's facts, still to be interpreted.
        numbers: theirs, read by the host.
        retries: number of earlier attempts.
        overflows: a line for each earlier attempt that names what overflowed.
    """

    facts: PendingFacts
    numbers: Sequence[float]
    retries: int = 0
    overflows: tuple[str, ...] = ()


def take_step(job: Job) -> TakenStep:
    """Forward, backward and optimizer step over the next micro-batches; every rank must call it."""
    max_retries = job.config.settings.run.overflow_retries
    batches: Iterable[Batch] = (_next_batch(job) for _ in range(job.accumulation_steps))
    num_labels = None
    if job.config.settings.data.num_labels_varies:
        batches = list(batches)
        num_labels = mean_num_labels(batches, job.engine.device)
    if not max_retries:
        facts, numbers = _attempt(job, batches, num_labels)
        return TakenStep(facts=facts, numbers=numbers)
    kept = list(batches)
    reports: list[StepReport] = []

    def attempt() -> Attempt:
        made = _attempt(job, kept, num_labels)
        reports.append(job.engine.optimizer.report)
        return made

    (facts, numbers), retries = retry_engine_step(job.engine, attempt, max_retries=max_retries)
    lines = (
        skip_line(job.step + 1, report, following.loss_scale, verb="overflowed")
        for report, following in pairwise(reports)
    )
    overflows = tuple(filter(None, lines))
    return TakenStep(facts=facts, numbers=numbers, retries=retries, overflows=overflows)


def _next_batch(job: Job) -> Batch:
    with job.phase("data"):
        batch = next(job.loader)
        for component in job.components:
            component.read_batch(batch)
    return batch


def _attempt(job: Job, batches: Iterable[Batch], num_labels: torch.Tensor | None) -> Attempt:
    """Make one attempt; returns the step's facts and their numbers."""
    for component in job.components:
        component.begin_attempt()
    run = _pipeline_attempt if job.is_pipeline else _engine_attempt
    config = None if job.is_pipeline else job.engine.module.config
    made = run(job, (upload(batch, job.engine.device, config) for batch in batches), num_labels)
    job.weights_have_changed()
    return made


def mean_num_labels(batches: Sequence[Batch], device: torch.device) -> torch.Tensor:
    """The mean number of labels in a micro-batch, over the step and all ranks; 0-dim fp32 on the device."""
    total = torch.stack([count_labels(batch["labels"]).sum() for batch in batches]).sum().double()
    if process_group.world_size() > 1:
        total = total.to(process_group.exchange_device(None, device))
        collectives.all_reduce(total)
    total = total.clamp(min=1)  # a step without any label has a loss of 0
    return (total / len(batches) / process_group.world_size()).to(device, torch.float32)


def _engine_attempt(job: Job, batches: Iterable[Batch], num_labels: torch.Tensor | None) -> Attempt:
    """Forward, backward and step for each micro-batch."""
    engine = job.engine
    loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    with _facts_of_step(job, lambda: loss_sum / job.accumulation_steps) as made:
        for batch in batches:
            timed = nullcontext() if job.rank_comparison is None else job.rank_comparison.forward()
            with job.phase("forward"), attention_within_documents(batch, engine.module.config), timed:
                loss = _forward(job, batch, num_labels)
            with job.phase("backward"):
                engine.backward(loss)
            loss_sum += loss.detach()
            with job.phase("optimizer step"):  # only after the last micro-batch; reduces gradients first
                engine.step()
    (facts,) = made  # there was one optimizer step
    return facts, engine.optimizer.report.also_read


def _forward(job: Job, batch: Batch, num_labels: torch.Tensor | None) -> torch.Tensor:
    """The loss of a micro-batch."""
    sources, losses = batch.pop(SOURCES, None), job.source_losses
    options = {} if num_labels is None else {"num_items_in_batch": num_labels}
    loss: torch.Tensor
    if sources is None or losses is None:
        loss = job.engine(**batch, **options).loss
    else:
        with token_losses.losses_of_rows(job.engine.module, batch["labels"]) as sums_of:
            output = job.engine(**batch, **options)
            losses.add(sources, batch["labels"], sums_of(output))
        loss = output.loss
    return loss


def _pipeline_attempt(job: Job, batches: Iterable[Batch], num_labels: torch.Tensor | None) -> Attempt:
    """All micro-batches in one call, which ends with the optimizer's step."""
    # list() reads all batches: middle stages use none, but their data position must advance as well
    micro_batches = list(batches)
    sources = [batch.pop(SOURCES, None) for batch in micro_batches]
    losses, rows = job.source_losses, list[torch.Tensor]()

    def loss() -> torch.Tensor | None:
        for places, batch, sums in zip(sources, micro_batches, rows, strict=False):  # only in the last stage
            if places is not None and losses is not None:
                losses.add(places, batch["labels"], sums)
        return loss_of_step(job.engine)

    with ExitStack() as stack:
        made = stack.enter_context(_facts_of_step(job, loss))
        stack.enter_context(job.phase("pipeline"))
        stack.enter_context(attention_within_documents(micro_batches[0], None))
        if num_labels is not None:
            stack.enter_context(loss_per_label(job.engine, num_labels))
        if losses is not None:
            rows = stack.enter_context(losses_of_rows(job.engine))
        job.engine.train_batch(iter(micro_batches))
    (facts,) = made
    return facts, job.engine.optimizer.report.also_read


@contextmanager
def _facts_of_step(job: Job, loss: Callable[[], torch.Tensor | None]) -> Iterator[list[PendingFacts]]:
    """Let the optimizer's step reduce the facts over the ranks, and read them with its own numbers.

    Args:
        job: the run.
        loss: the mean over the micro-batches, known when the optimizer steps; None on ranks without one.

    Yields:
        A list that gets the facts.
    """
    optimizer, made = job.engine.optimizer, list[PendingFacts]()

    def also_read() -> torch.Tensor:
        with job.phase("facts"):
            made.append(_pending_facts(job, loss()))
        return made[-1].numbers

    optimizer.also_read = also_read
    try:
        yield made
    finally:
        optimizer.also_read = None


def _pending_facts(job: Job, loss: torch.Tensor | None) -> PendingFacts:
    regularizer = job.engine.regularizer
    sums = [] if job.source_losses is None else [job.source_losses.sums]
    if job.rank_comparison is not None and loss is not None:
        sums.append(job.rank_comparison.sums(loss))
    return PendingFacts(
        torch.zeros((), device=job.engine.device) if loss is None else loss,
        weight=0.0 if loss is None else 1.0,
        tracker=job.counting_tracker,
        regularization=None if regularizer is None else regularizer.value,
        is_stop_asked=pending_stop_signal() is not None or job.is_folder_lost,
        sums=torch.cat(sums) if sums else None,
    )
