"""The training loop: steps, records, checkpoints, rollbacks and the end of training.

The loop defines the order only; state is in `job.py`, `records/` and `components/`. A step that is skipped
because its gradients were not finite still counts as a step: every record has a line for it, and the data
position advances. The learning-rate schedule does not.

If the loss guard requests a rollback, all ranks load the newest checkpoint saved before the problem began,
within the running processes. Everything except the data position is restored, so the repeated steps train on
new batches. The result is bitwise equal to a run that resumes from that checkpoint at the later data
position. Records and checkpoints of later steps are removed, because those steps are repeated.

A kill after a rollback is harmless: until the next checkpoint, the resumed run repeats the same steps, meets
the same problem and rolls back again. To ensure this, a rollback prefers checkpoints at multiples of
`checkpoint.every` to those saved on request, for example before a time limit.
Not covered: settings that are changed when the run is resumed.
"""

from __future__ import annotations

import math
import time
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import of_all_ranks
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import DivergenceError
from megalowbit.optim.gradients.report import StepReport
from megalowbit.optim.optimizers.base import MegatronOptimizer
from megalowbit.optim.optimizers.param_groups import learning_rate
from megalowbit.pretrain.components.loss_guard import GuardDecision
from megalowbit.pretrain.job import Job
from megalowbit.pretrain.overflow_retry import take_step
from megalowbit.pretrain.records.lines import skip_line
from megalowbit.pretrain.records.recorder import Recorder
from megalowbit.pretrain.stopping.signals import uninterrupted
from megalowbit.supervision.settings import WatchdogSettings
from megalowbit.supervision.watchdog import Watchdog
from megalowbit.telemetry.facts import Fact, Facts


class Ending(Enum):
    """How training ended: after its last step, or earlier on request."""

    DONE = "done"
    STOPPED = "stopped"


def train(job: Job, recorder: Recorder, watchdog: Watchdog | None = None) -> Ending:
    """Train until the configured number of steps; record each step and save checkpoints.

    If any rank has a pending stop signal (`stopping/signals.py`), all ranks save after the same step and end.

    Raises:
        DivergenceError: `run.max_consecutive_skips` consecutive steps had non-finite gradients or losses, or
            the loss guard stops the run.
    """
    settings = job.config.settings
    watchdog = watchdog or Watchdog(WatchdogSettings(timeout=None), ProcessIdentity())
    while job.step < settings.run.steps:
        watchdog.mark(f"step {job.step + 1}")
        for component in job.components:
            recorder.log(component.before_step(job.step))
        step = _evaluated(job, train_step(job), watchdog)
        _record(job, recorder, step)
        recorder.log(watchdog.step_ended(step.seconds))
        watchdog.mark(f"the end of step {job.step}")  # a rollback loads a checkpoint
        if guard_loss(job, recorder, is_skipped=step.is_skipped):
            continue
        is_lost = step.is_skipped or not math.isfinite(job.totals.final_loss or 0.0)
        job.skips_in_a_row = job.skips_in_a_row + 1 if is_lost else 0
        if job.skips_in_a_row >= settings.run.max_consecutive_skips:
            raise too_many_skips(job.step, job.skips_in_a_row, step.facts)
        is_last = job.step == settings.run.steps
        if is_last or step.is_stop_asked or _is_save_due(job, recorder):
            recorder.sync()  # after a power failure a checkpoint must not be newer than the records
            watchdog.mark(f"the save of step {job.step}", is_save=True)
            with uninterrupted():
                job.save()
            watchdog.mark(f"the end of step {job.step}")
        if step.is_stop_asked and not is_last:
            return Ending.STOPPED
    return Ending.DONE


def _evaluated(job: Job, step: TrainedStep, watchdog: Watchdog) -> TrainedStep:
    """The step with the columns of components that evaluate the model after it."""

    def progress() -> None:
        watchdog.mark(f"the validation of step {job.step}")

    facts = dict(step.facts)
    for component in job.components:
        facts |= component.evaluate(job.step, progress)
    return step._replace(facts=facts)


def _is_save_due(job: Job, recorder: Recorder) -> bool:
    """Whether to save a checkpoint now; logs a line if a periodic one is due but the loss is not stable."""
    if job.step in job.named_checkpoints.values():
        return True
    if job.step % job.checkpoint_every:
        return False
    if not job.loss_guard.is_stable:
        recorder.log(f"step {job.step}: no checkpoint saved, because the loss is not stable")
    return job.loss_guard.is_stable


def too_many_skips(step: int, skips_in_a_row: int, facts: Facts) -> DivergenceError:
    """The error that ends training after too many skipped steps in a row."""
    message = (
        f"the gradients or losses of {skips_in_a_row} steps in a row were not finite (step {step}, "
        f"loss {facts['loss']}, loss scale {facts['loss_scale']:g}): start a new run from the last good "
        "checkpoint (megalowbit.model.checkpoint) with a lower learning rate, or with a lower loss scale if "
        "the loss is finite"
    )
    return of_all_ranks(DivergenceError(message))


def _record(job: Job, recorder: Recorder, step: TrainedStep) -> None:
    """Record the step just taken, and log its retries and whether it was skipped."""
    recorder.step(step.facts)
    optimizer = job.engine.optimizer
    for line in step.overflows:
        recorder.log(f"{line}; retried")
    recorder.log(skip_line(job.step, optimizer.report, optimizer.loss_scale))
    for component in job.components:
        recorder.follow(component, step.facts)


def guard_loss(job: Job, recorder: Recorder, *, is_skipped: bool) -> bool:
    """Apply the loss guard's decision about the step just recorded; every rank must call it.

    Returns:
        Whether the run was rolled back.

    Raises:
        DivergenceError: the guard stops the run, or there is no checkpoint to roll back to.
    """
    loss = job.totals.final_loss
    assert loss is not None  # a step was taken
    decision = job.loss_guard.judge(job.step, loss, is_skipped=is_skipped)
    if decision.action == "stop":
        raise of_all_ranks(DivergenceError(f"{decision.line}"))
    if decision.action == "roll back":
        roll_back(job, recorder, decision)
        return True
    recorder.log(decision.line)
    return False


def roll_back(job: Job, recorder: Recorder, decision: GuardDecision) -> None:
    """Roll back as the guard has decided; every rank must call it, between two steps.

    Raises:
        DivergenceError: there is no good checkpoint to roll back to.
    """
    assert decision.since is not None  # set by every decision to roll back
    path = _checkpoint_before(job, decision.since)
    if path is None:
        message = (
            f"{decision.line}: there is no checkpoint from before step {decision.since} to roll back to; "
            "start a new run with a lower learning rate or other data, or lower megalowbit.checkpoint.every"
        )
        raise of_all_ranks(DivergenceError(message))
    guard, step, position = job.loss_guard, job.step, job.loader.state_dict()
    made = list(guard.rollbacks)
    job.load(path)
    job.loader.load_state_dict(position)
    job.plan_data()  # later phases of a blend begin at their steps, as before
    guard.rollbacks = [*made, {"after_step": step, "to_step": job.step, "reason": decision.line}]
    job.store.remove_after(job.step)
    job.note_checkpoints()
    job.store.name_checkpoints(job.named_checkpoints)
    recorder.roll_back()
    recorder.log(
        f"rolled back after step {step} to step {job.step} ({decision.line}): training continues with new "
        f"batches; rollback {len(guard.rollbacks)} of {guard.settings.max_rollbacks}"
    )


def _checkpoint_before(job: Job, since: int) -> Path | None:
    """The newest good checkpoint from before step `since`, preferably at a multiple of `checkpoint.every`."""
    for until in dict.fromkeys((job.loss_guard.newest_good_step(since), since - 1)):
        for every in (job.checkpoint_every, 1):
            path = job.store.latest(until=until, every=every)
            if path is not None:
                return path
    return None


class TrainedStep(NamedTuple):
    """The result of one optimizer step.

    Attributes:
        facts: columns for the records.
        is_skipped: whether the update was skipped.
        overflows: one line for each attempt that was repeated.
        is_stop_asked: whether any rank has a pending stop signal.
        seconds: duration.
    """

    facts: Facts
    is_skipped: bool
    overflows: tuple[str, ...]
    is_stop_asked: bool
    seconds: float


def train_step(job: Job) -> TrainedStep:
    """Take one optimizer step, retries included, and collect its facts; every rank must call it."""
    engine, optimizer = job.engine, job.engine.optimizer
    started, skipped_before = time.perf_counter(), engine.skipped_steps
    rate = learning_rate(optimizer.param_groups[0])
    attempt = take_step(job)
    for component in job.components:
        component.end_step()
    seen = attempt.facts.interpret(attempt.numbers)
    sums = seen.sums
    if job.rank_comparison is not None:
        size = 2 * process_group.world_size()
        sums, of_ranks = sums[:-size], sums[-size:]
        job.rank_comparison.note(of_ranks)
    if job.source_losses is not None:
        job.source_losses.note(sums)
    is_skipped = engine.skipped_steps > skipped_before
    seconds = time.perf_counter() - started
    overflow = optimizer.report.overflow
    job.totals.add_step(
        loss=seen.loss,
        tokens=job.tokens_per_step,
        seconds=seconds,
        is_skipped=is_skipped,
        overflow=None if overflow is None else (overflow.tensor, overflow.rank),
    )
    facts: Facts = {
        **seen.facts(),
        "lr": rate,
        **optimizer_facts(optimizer, optimizer.report),
        "skipped_steps": job.totals.skipped_steps,
        "tokens_per_second": job.tokens_per_step / seconds,
        "step_ms": 1000 * seconds,
        "tokens": job.totals.tokens,
        **({"overflow_retries": attempt.retries} if attempt.retries else {}),
    }
    for component in job.components:
        facts = {**facts, **component.facts(facts)}
    return TrainedStep(facts, is_skipped, attempt.overflows, seen.is_stop_asked, seconds)


def optimizer_facts(optimizer: MegatronOptimizer, report: StepReport) -> Facts:
    """The optimizer's facts about the step just taken; optional ones only if they are enabled.

    `skipped/tensor` and `skipped/rank` name the first non-finite gradient and exist for skipped steps only.
    `milliseconds/…` are mean durations of the phases that the device has finished since the last step.
    """
    facts: dict[str, Fact] = {"grad_norm": report.grad_norm, "loss_scale": report.loss_scale}
    if optimizer.log_num_zeros_in_grad:
        facts["num_zeros"] = report.num_zeros
    if report.overflow is not None:
        facts["skipped/tensor"] = report.overflow.tensor
        facts["skipped/rank"] = report.overflow.rank
        facts["skipped/ranks"] = len(report.overflow.ranks)
        facts["skipped/tensors"] = report.overflow.num_tensors
    if optimizer.layer_scaling is not None:
        facts["largest_layer_factor"] = max(optimizer.layer_scaling.factors.values(), default=1.0)
    if optimizer.timers is not None:
        facts |= {f"milliseconds/{phase}": value for phase, value in optimizer.timers.milliseconds().items()}
    return facts
