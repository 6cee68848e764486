"""The loop: one step, its facts, its checkpoint, the end.

Everything with state lives elsewhere (`job.py`, `recorder.py`); here is only the order of things. A step
that is skipped because gradients were not finite is a step: it has a line in every record, it moves the data
on and holds the learning rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from megalowbit.engine.agreement import agree, gather, raised_on_all_ranks
from megalowbit.engine.config import load_json
from megalowbit.engine.nested_blocks import check_nested_blocks
from megalowbit.engine.parameter_split import WeightSplitReport
from megalowbit.engine.pipeline import gather_weights
from megalowbit.engine.process_start import start_process_group
from megalowbit.engine.run_checks import check_ranks_agree, configuration_facts, installation_facts
from megalowbit.engine.watchdog import Watchdog, print_error
from megalowbit.engine.watchdog_settings import WatchdogSettings
from megalowbit.engine.whole_weights import whole_state_dict
from megalowbit.errors import UserError
from megalowbit.hf.model import random_model, save_hf
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.layers.surgery import product_counts
from megalowbit.optim.optimizer_step import learning_rate
from megalowbit.pretrain.config import Monitors, PretrainConfig
from megalowbit.pretrain.job import Job, assemble
from megalowbit.pretrain.kernels import check_kernels
from megalowbit.pretrain.late_switch import check_switchable
from megalowbit.pretrain.opening import opening, products_line
from megalowbit.pretrain.optimizer_facts import optimizer_facts, skip_line
from megalowbit.pretrain.overflow_retry import take_step
from megalowbit.pretrain.recorder import Recorder
from megalowbit.pretrain.resume import changed_settings
from megalowbit.pretrain.roll_back import guard_loss
from megalowbit.pretrain.run_folder import RunFolder, claim
from megalowbit.pretrain.speculation import check_speculation, line_after_switch, look_facts
from megalowbit.pretrain.stop_signals import pending_stop_signal, uninterrupted
from megalowbit.process_group import ProcessIdentity
from megalowbit.speculation.report import SpeculationReport
from megalowbit.telemetry.console import Console
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.step_facts import reduce_step_facts


def pretrain(
    config: PretrainConfig,
    identity: ProcessIdentity,
    *,
    run_dir: Path | None,
    is_resume: bool,
    tell: Callable[[UserError], None] = print_error,
    at_first_step: Callable[[], None] | None = None,
) -> None:
    """Train until `run.steps`; every rank of the job calls this once.

    Args:
        config: resolved.
        identity: this process.
        run_dir: the folder the user asked for; None: a new one.
        is_resume: whether an existing run may be continued.
        tell: says why the process ends where it ends in here, as `Watchdog` does.
        at_first_step: called when the start is over, and steps begin to look for stop signals.

    Raises:
        TransientError: a rank was lost, hangs or cannot be reached.
        UserError: a mistake in configuration, data or folders, or training that cannot go on.
    """
    start_process_group(identity)
    check_ranks_agree(start_facts(config, is_resume=is_resume))
    check_nested_blocks(config.parts)
    agree(lambda: check_kernels(recipe_of(config.recipe)))
    agree(lambda: check_switchable(config.settings.late_switch, recipe_of(config.recipe)))
    agree(lambda: check_speculation(config.settings.speculation, recipe_of(config.recipe)))
    stem = config.settings.run.name or config.source.stem
    folder: RunFolder = agree(lambda: claim(stem, run_dir=run_dir, is_resume=is_resume))
    with ExitStack() as stack:
        agree(lambda: stack.enter_context(folder.held()))
        changes = agree(lambda: _compare_with_saved(config, folder)) if is_resume else []
        job = assemble(config, identity, folder)
        watchdog = Watchdog(config.parts.settings.watchdog, identity, folder=folder.path, tell=tell)
        stack.enter_context(watchdog)
        watchdog.mark("the load of a checkpoint")
        is_resumed = is_resume and job.resume()
        console = Console(
            config.settings.run.steps,
            log_every=config.settings.telemetry.log_every,
            start_step=job.step,
            skipped_steps=job.totals.skipped_steps,
            is_main=identity.is_main,
        )
        console.print(opening(job, identity, is_resumed=is_resumed, changes=changes))
        if at_first_step is not None:
            at_first_step()
        is_summed_up = agree(lambda: folder.is_summed_up(job.step))  # or it was killed just before that
        if job.step < config.settings.run.steps or not is_summed_up:
            with Recorder(job, console, is_main=identity.is_main, is_resume=is_resume) as recorder:
                ending = train(job, recorder, watchdog)
                if ending is Ending.STOPPED:
                    recorder.tell(f"stopped after step {job.step} as asked: go on with --resume auto")
                    return
                recorder.finish()
                products = products_of_all_stages(job)
                if job.recipe.gemm != "bf16" and products:
                    console.print(products_line(products))
        else:
            console.print(f"nothing left to do: raise megalowbit.run.steps above {job.step} to go on")
        watchdog.mark("the export", is_save=True)
        export(job, console)
        watchdog.finish()
        agree(lambda: folder.mark_done(job.step))


def start_facts(config: PretrainConfig, *, is_resume: bool) -> dict[str, str]:
    """What must be alike on all ranks before they do anything together."""
    return {
        **installation_facts(),
        "resume": str(is_resume),
        **configuration_facts(config.parts),
        **{
            f"configuration key {name}": str(getattr(config.monitors, name)) for name in Monitors.model_fields
        },
    }


def _compare_with_saved(config: PretrainConfig, folder: RunFolder) -> list[str]:
    return changed_settings(load_json(folder.config), config.to_dict()) if folder.is_started else []


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


def export(job: Job, console: Console) -> None:
    """Leave an ordinary HuggingFace checkpoint of the final model in `hf/`, if asked to and not there yet."""
    # rank 0's view: others may look when it has begun to write, and would leave it gathering alone
    if not job.config.settings.checkpoint.export_hf or agree(job.folder.hf.exists):
        return
    model = job.engine.module
    is_in_parts = job.engine.process_grid.tensor_size > 1 or job.engine.zero_optimization_stage() == 3
    whole = whole_state_dict(job.engine) if is_in_parts else None
    if job.is_pipeline:  # gathered weights are those of plain layers, of which no stage has all
        whole = gather_weights(model)
        model = random_model(model.config, seed=0, device="meta")
    agree(lambda: save_hf(model, job.folder.hf, job.loader.tokenizer, whole=whole))
    console.print(f"HuggingFace checkpoint: {job.folder.hf}")


def products_of_all_stages(job: Job) -> dict[str, dict[str, int]]:
    """What products have run in, in this process and in the other stages of its pipeline; collective."""
    grid = job.engine.process_grid
    total: dict[str, dict[str, int]] = {}
    mine = (grid.data_rank, grid.tensor_rank)
    for place, counts in gather((mine, product_counts(job.engine.module))):
        if place == mine:
            for product, paths in counts.items():
                sums = total.setdefault(product, {})
                for path, count in paths.items():
                    sums[path] = sums.get(path, 0) + count
    return total
