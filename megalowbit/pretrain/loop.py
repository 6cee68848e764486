"""The loop: one step, its facts, its checkpoint, the end.

Everything with state lives elsewhere (`job.py`, `recorder.py`); here is only the order of things. A step
that is skipped because gradients were not finite is a step: it has a line in every record, it moves the data
on and holds the learning rate.
"""

from __future__ import annotations

import math
import time
from enum import Enum
from typing import NamedTuple

from megalowbit.distributed.agreement import raised_on_all_ranks
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.engine.parameters.split import WeightSplitReport
from megalowbit.errors import UserError
from megalowbit.optim.optimizers.param_groups import learning_rate
from megalowbit.pretrain.components.speculation import line_after_switch, look_facts
from megalowbit.pretrain.job import Job
from megalowbit.pretrain.overflow_retry import take_step
from megalowbit.pretrain.records.optimizer_facts import optimizer_facts, skip_line
from megalowbit.pretrain.records.recorder import Recorder
from megalowbit.pretrain.roll_back import guard_loss
from megalowbit.pretrain.stopping.signals import pending_stop_signal, uninterrupted
from megalowbit.speculation.report import SpeculationReport
from megalowbit.supervision.settings import WatchdogSettings
from megalowbit.supervision.watchdog import Watchdog
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.step_facts import reduce_step_facts


class Ending(Enum):
    """How training ended: after its last step, or where it was asked to."""

    DONE = "done"
    STOPPED = "stopped"


def train(job: Job, recorder: Recorder, watchdog: Watchdog | None = None) -> Ending:
    """Step until the configured number of steps, recording and saving on the way and at the end.

    Where any rank is asked to stop (`stop_signals`), all save after the same step and end.

    Raises:
        UserError: `run.max_consecutive_skips` steps in a row had non-finite gradients or losses, or the loss
            guard stops the run.
    """
    settings = job.config.settings
    watchdog = watchdog or Watchdog(WatchdogSettings(timeout=None), ProcessIdentity())
    while job.step < settings.run.steps:
        watchdog.mark(f"step {job.step + 1}")
        _switch_if_due(job, recorder)
        split = job.split_weights()
        if split is not None:
            recorder.tell(f"before step {job.step + 1}: {split}")
        step = train_step(job)
        _record(job, recorder, step, split)
        recorder.tell(watchdog.step_ended(step.seconds))
        watchdog.mark(f"the end of step {job.step}")  # a rollback loads a checkpoint
        if guard_loss(job, recorder, is_skipped=step.is_skipped):
            continue
        is_lost = step.is_skipped or not math.isfinite(job.totals.final_loss or 0.0)
        job.skips_in_a_row = job.skips_in_a_row + 1 if is_lost else 0
        if job.skips_in_a_row >= settings.run.max_consecutive_skips:
            raise too_many_skips(job.step, job.skips_in_a_row, step.facts)
        is_last = job.step == settings.run.steps
        if is_last or step.is_stop_asked or _is_save_due(job, recorder):
            recorder.sync()  # a power cut must not leave a checkpoint whose records are gone
            watchdog.mark(f"the save of step {job.step}", is_save=True)
            with uninterrupted():
                job.save()
            watchdog.mark(f"the end of step {job.step}")
        if step.is_stop_asked and not is_last:
            return Ending.STOPPED
    _switch_if_due(job, recorder)  # where no step was left, but the summary
    return Ending.DONE


def _is_save_due(job: Job, recorder: Recorder) -> bool:
    """Whether a checkpoint is due that is worth going back to; if not, that is told."""
    if job.step % job.checkpoint_every:
        return False
    if not job.loss_guard.is_calm:
        recorder.tell(f"step {job.step}: no checkpoint while the loss is in trouble")
    return job.loss_guard.is_calm


def too_many_skips(step: int, skips_in_a_row: int, facts: Facts) -> UserError:
    """Training cannot go on: no update was applied for so long."""
    return raised_on_all_ranks(
        f"the gradients or losses of {skips_in_a_row} steps in a row were not finite (step {step}, "
        f"loss {facts['loss']}, loss scale {facts['loss_scale']:g}): start a new run with a lower "
        "learning rate, or a lower loss scale if the loss is finite, from the last good checkpoint "
        "with megalowbit.model.checkpoint"
    )


def _record(job: Job, recorder: Recorder, step: TrainedStep, split: WeightSplitReport | None) -> None:
    """Tell everyone who follows the run what the step just taken was like."""
    facts: Facts = {**step.facts, **job.loss_guard.facts()}
    if job.recipe.parameter_split is not None:
        facts = {**facts, "weights_split": len(split.ranks) if split is not None else 0}
    recorder.step(facts)
    recorder.look(step.look)
    optimizer = job.engine.optimizer
    for line in step.overflows:
        recorder.tell(f"{line}; tried again")
    recorder.tell(skip_line(job.step, optimizer.report, optimizer.loss_scale))
    if job.late_switch is not None and job.totals.final_loss is not None:
        recorder.tell(job.late_switch.after_step(job.step, job.totals.final_loss))


def _switch_if_due(job: Job, recorder: Recorder) -> None:
    """Let the late switch act before a step, and tell of it."""
    if job.late_switch is None:
        return
    told = job.late_switch.before_step(job.step)
    recorder.tell(told)
    if told is not None and job.speculation is not None:
        job.speculation.look_next()  # totals would count what it decided before
        recorder.tell(line_after_switch(job.late_switch.recipe))


class TrainedStep(NamedTuple):
    """What became of an optimizer step.

    Attributes:
        facts: for the records.
        is_skipped: whether its update was left out.
        overflows: a line for each try that was repeated.
        look: what speculation found, if it looked.
        is_stop_asked: whether any rank was asked to stop.
        seconds: it took.
    """

    facts: Facts
    is_skipped: bool
    overflows: tuple[str, ...]
    look: SpeculationReport | None
    is_stop_asked: bool
    seconds: float


def train_step(job: Job) -> TrainedStep:
    """One optimizer step over all its micro-batches, repeated ones included; every rank must call it."""
    engine, optimizer = job.engine, job.engine.optimizer
    started, skipped_before = time.perf_counter(), engine.skipped_steps
    rate = learning_rate(optimizer.param_groups[0])
    attempt = take_step(job)
    look = job.speculation.end_step() if job.speculation is not None else None
    seen = reduce_step_facts(
        attempt.loss,
        tracker=job.tracker,
        regularization=engine.regularizer.value if engine.regularizer is not None else None,
        is_stop_asked=pending_stop_signal() is not None,
    )
    is_skipped = engine.skipped_steps > skipped_before
    seconds = time.perf_counter() - started
    job.totals.add_step(loss=seen.loss, tokens=job.tokens_per_step, seconds=seconds, is_skipped=is_skipped)
    facts: Facts = {
        **seen.facts(),
        "lr": rate,
        **optimizer_facts(optimizer, optimizer.report),
        "skipped_steps": job.totals.skipped_steps,
        "tokens_per_second": job.tokens_per_step / seconds,
        "tokens": job.totals.tokens,
        **({"overflow_retries": attempt.retries} if attempt.retries else {}),
        **(job.late_switch.facts() if job.late_switch is not None else {}),
        **(look_facts(look, job.speculation.totals()) if look is not None and job.speculation else {}),
    }
    return TrainedStep(facts, is_skipped, attempt.overflows, look, seen.is_stop_asked, seconds)
