"""The loop: one step, its facts, its checkpoint, the way back from trouble, the end.

Everything with state lives elsewhere (`job.py`, `records/`, `components/`); here is only the order of things.
A step that is skipped because gradients were not finite is a step: it has a line in every record, it moves
the data on and holds the learning rate.

Where the loss guard asks for it, the run goes back to a checkpoint from before its loss was in trouble, and
leaves out the data it met since. That happens within the process, on all ranks together: everything that a
resumed run takes from a checkpoint is taken from it, but for the data position, which stays where it is. The
run then is bitwise the one that would be resumed from that checkpoint further on in the data. Records and
checkpoints of later steps are dropped, for these steps come again.

A kill afterwards loses nothing of this: until the next checkpoint the resumed run goes the same way into the
same trouble and back. To keep it so whatever else has been saved, as on request before a time limit, a
checkpoint of the run's own rhythm (`checkpoint.every`) is taken first.
Not covered: settings that were changed in between.
"""

from __future__ import annotations

import math
import time
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from megalowbit.distributed.agreement import raised_on_all_ranks
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.optim.gradients.report import StepReport
from megalowbit.optim.optimizers.base import MegatronOptimizer
from megalowbit.optim.optimizers.param_groups import learning_rate
from megalowbit.pretrain.components.loss_guard import GuardDecision
from megalowbit.pretrain.job import Job
from megalowbit.pretrain.overflow_retry import take_step
from megalowbit.pretrain.records.lines import skip_line
from megalowbit.pretrain.records.recorder import Recorder
from megalowbit.pretrain.stopping.signals import pending_stop_signal, uninterrupted
from megalowbit.supervision.settings import WatchdogSettings
from megalowbit.supervision.watchdog import Watchdog
from megalowbit.telemetry.facts import Fact, Facts
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
        for component in job.components:
            recorder.log(component.before_step(job.step))
        step = train_step(job)
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
            recorder.sync()  # a power cut must not leave a checkpoint whose records are gone
            watchdog.mark(f"the save of step {job.step}", is_save=True)
            with uninterrupted():
                job.save()
            watchdog.mark(f"the end of step {job.step}")
        if step.is_stop_asked and not is_last:
            return Ending.STOPPED
    return Ending.DONE


def _is_save_due(job: Job, recorder: Recorder) -> bool:
    """Whether a checkpoint is due that is worth going back to; if not, that is logged."""
    if job.step % job.checkpoint_every:
        return False
    if not job.loss_guard.is_stable:
        recorder.log(f"step {job.step}: no checkpoint while the loss is in trouble")
    return job.loss_guard.is_stable


def too_many_skips(step: int, skips_in_a_row: int, facts: Facts) -> UserError:
    """Training cannot go on: no update was applied for so long."""
    return raised_on_all_ranks(
        f"the gradients or losses of {skips_in_a_row} steps in a row were not finite (step {step}, "
        f"loss {facts['loss']}, loss scale {facts['loss_scale']:g}): start a new run with a lower "
        "learning rate, or a lower loss scale if the loss is finite, from the last good checkpoint "
        "with megalowbit.model.checkpoint"
    )


def _record(job: Job, recorder: Recorder, step: TrainedStep) -> None:
    """Record the step just taken, and say what was special about it."""
    recorder.step(step.facts)
    optimizer = job.engine.optimizer
    for line in step.overflows:
        recorder.log(f"{line}; tried again")
    recorder.log(skip_line(job.step, optimizer.report, optimizer.loss_scale))
    for component in job.components:
        recorder.follow(component, step.facts)


def guard_loss(job: Job, recorder: Recorder, *, is_skipped: bool) -> bool:
    """Let the guard judge the step just taken and recorded, and do what it asks; every rank must call it.

    Returns:
        Whether the run has gone back.

    Raises:
        UserError: it cannot go on.
    """
    loss = job.totals.final_loss
    assert loss is not None  # a step was taken
    decision = job.loss_guard.judge(job.step, loss, is_skipped=is_skipped)
    if decision.action == "stop":
        raise raised_on_all_ranks(f"{decision.line}")
    if decision.action == "roll back":
        roll_back(job, recorder, decision)
        return True
    recorder.log(decision.line)
    return False


def roll_back(job: Job, recorder: Recorder, decision: GuardDecision) -> None:
    """Go back as the guard's decision asks; every rank must call it, between two steps.

    Raises:
        UserError: there is no good checkpoint to go back to.
    """
    assert decision.since is not None  # whoever rolls back knows from what
    path = _checkpoint_before(job, decision.since)
    if path is None:
        raise raised_on_all_ranks(
            f"{decision.line}: there is no checkpoint from before step {decision.since} to roll back to; "
            "train anew with a lower learning rate or other data, or lower megalowbit.checkpoint.every"
        )
    guard, step, position = job.loss_guard, job.step, job.loader.state_dict()
    made = list(guard.rollbacks)
    job.load(path)
    job.loader.load_state_dict(position)
    guard.rollbacks = [*made, {"after_step": step, "to_step": job.step, "reason": decision.line}]
    job.store.remove_after(job.step)
    recorder.roll_back()
    recorder.log(
        f"rolled back after step {step} to step {job.step} ({decision.line}): training goes on with the data "
        f"that come next; rollback {len(guard.rollbacks)} of {guard.settings.max_rollbacks}"
    )


def _checkpoint_before(job: Job, since: int) -> Path | None:
    """The newest good checkpoint from before a step, one of the run's own rhythm if there is any."""
    for until in dict.fromkeys((job.loss_guard.newest_good_step(since), since - 1)):
        for every in (job.checkpoint_every, 1):
            path = job.store.latest(until=until, every=every)
            if path is not None:
                return path
    return None


class TrainedStep(NamedTuple):
    """What became of an optimizer step.

    Attributes:
        facts: for the records.
        is_skipped: whether its update was left out.
        overflows: a line for each try that was repeated.
        is_stop_asked: whether any rank was asked to stop.
        seconds: it took.
    """

    facts: Facts
    is_skipped: bool
    overflows: tuple[str, ...]
    is_stop_asked: bool
    seconds: float


def train_step(job: Job) -> TrainedStep:
    """One optimizer step over all its micro-batches, repeated ones included; every rank must call it."""
    engine, optimizer = job.engine, job.engine.optimizer
    started, skipped_before = time.perf_counter(), engine.skipped_steps
    rate = learning_rate(optimizer.param_groups[0])
    attempt = take_step(job)
    for component in job.components:
        component.end_step()
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
    }
    for component in job.components:
        facts = {**facts, **component.facts(facts)}
    return TrainedStep(facts, is_skipped, attempt.overflows, seen.is_stop_asked, seconds)


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
