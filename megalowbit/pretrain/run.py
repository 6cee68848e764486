"""A run from its first check to its export; every rank of the job goes through it once.

What can be wrong is found before anything is written, the folder is held as long as the run lasts, and the
mark of a finished run is the last thing that is written. The steps themselves are `loop.py`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megalowbit.config.deepspeed_json import load_json
from megalowbit.distributed.agreement import agree, gather, raised_on_all_ranks
from megalowbit.distributed.process_group import ProcessIdentity, is_true_anywhere
from megalowbit.engine.parameters.whole_weights import whole_state_dict
from megalowbit.engine.pipeline.setup import gather_weights
from megalowbit.engine.process_start import start_process_group
from megalowbit.engine.run_checks.ranks_agree import (
    check_ranks_agree,
    configuration_facts,
    installation_facts,
)
from megalowbit.errors import TransientError, UserError, file_system_error
from megalowbit.hf.generation import remember, remembered
from megalowbit.hf.model import random_model, save_hf
from megalowbit.layers.conversion.convert import added_counts, product_counts
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.checks import check_config, check_kernels
from megalowbit.pretrain.config import Monitors, PretrainConfig
from megalowbit.pretrain.job import Job, assemble
from megalowbit.pretrain.loop import Ending, train
from megalowbit.pretrain.records.lines import products_line, startup_lines
from megalowbit.pretrain.records.recorder import Recorder
from megalowbit.pretrain.resume import changed_settings, check_is_configuration
from megalowbit.pretrain.run_folder.folder import RunFolder, claim
from megalowbit.pretrain.run_folder.lost_checkpoints import check_checkpoints_are_there
from megalowbit.pretrain.run_folder.restart import check_restart, move_aside
from megalowbit.supervision.collective_trace import is_failed_collective, trace_of_error
from megalowbit.supervision.watchdog import Watchdog, print_error
from megalowbit.telemetry.sinks.console import Console

logger = logging.getLogger(__name__)


def pretrain(
    config: PretrainConfig,
    identity: ProcessIdentity,
    *,
    run_dir: Path | None,
    is_resume: bool,
    is_restart: bool = False,
    report: Callable[[UserError], None] = print_error,
    at_first_step: Callable[[], None] | None = None,
    has_launcher_ended: Callable[[], bool] | None = None,
) -> None:
    """Train until `run.steps`; every rank of the job calls this once.

    Args:
        config: resolved.
        identity: this process.
        run_dir: the folder the user asked for; None: a new one.
        is_resume: whether an existing run may be continued.
        is_restart: whether one in `run_dir` moves aside, to begin again; not together with `is_resume`.
        report: says why the process ends where it ends in here, as `Watchdog` does.
        at_first_step: called when the start is over, and steps begin to look for stop signals.
        has_launcher_ended: asked where the run was stopped, for what stopped it; None: nobody did.

    Raises:
        TransientError: a rank was lost, hangs or cannot be reached, or the launcher has ended without them.
        UserError: a mistake in configuration, data or folders, or training that cannot go on.
    """
    with ExitStack() as stack:
        stack.enter_context(report_lost_ranks(identity))
        start_process_group(identity)
        folder = _lock_folder(stack, config, run_dir=run_dir, is_resume=is_resume, is_restart=is_restart)
        changes = agree(lambda: _compare_with_saved(config, folder)) if is_resume else []
        job = assemble(config, identity, folder)
        watchdog = Watchdog(config.parts.settings.watchdog, identity, folder=folder.path, report=report)
        stack.enter_context(watchdog)
        watchdog.mark("the load of a checkpoint")
        is_resumed = is_resume and job.resume()
        if is_restart or (is_resume and not is_resumed):
            agree(lambda: _move_aside(folder) if is_restart else _keep_records(folder))
        console = _console(job, identity)
        console.print(startup_lines(job, identity, is_resumed=is_resumed, changes=changes))
        if at_first_step is not None:
            at_first_step()
        has_summary_of = agree(lambda: folder.has_summary_of(job.step))  # or it was killed just before that
        if job.step >= config.settings.run.steps and has_summary_of:
            console.print(f"nothing left to do: raise megalowbit.run.steps above {job.step} to go on")
        else:
            recorder = Recorder(job, console, is_main=identity.is_main, is_resume=is_resume)
            if _train(job, recorder, watchdog, has_launcher_ended) is Ending.STOPPED:
                return
            _print_products(job, console)
        watchdog.mark("the export", is_save=True)
        export(job, console)
        watchdog.finish()
        agree(lambda: folder.mark_done(job.step))


def _train(
    job: Job, recorder: Recorder, watchdog: Watchdog, has_launcher_ended: Callable[[], bool] | None
) -> Ending:
    with recorder:
        ending = train(job, recorder, watchdog)
        if ending is Ending.STOPPED:
            _refuse_lost_launcher(has_launcher_ended, job.step)
            recorder.log(f"stopped after step {job.step} as asked: go on with --resume auto")
        else:
            recorder.finish()
    return ending


def _console(job: Job, identity: ProcessIdentity) -> Console:
    return Console(
        job.config.settings.run.steps,
        log_every=job.config.settings.telemetry.log_every,
        start_step=job.step,
        skipped_steps=job.totals.skipped_steps,
        is_main=identity.is_main,
    )


def _refuse_lost_launcher(has_ended: Callable[[], bool] | None, step: int) -> None:
    """Nobody waits for this end, so it is one that another try begins after; collective."""
    if is_true_anywhere(has_ended is not None and has_ended()):
        raise raised_on_all_ranks(
            f"the launcher has ended without its ranks: saved after step {step}, go on with --resume auto",
            is_transient=True,
        )


def _lock_folder(
    stack: ExitStack, config: PretrainConfig, *, run_dir: Path | None, is_resume: bool, is_restart: bool
) -> RunFolder:
    """The run's folder, kept from other jobs until the run ends, once all that needs no model is checked."""
    check_ranks_agree(start_facts(config, is_resume=is_resume, is_restart=is_restart))
    if is_restart:
        agree(lambda: _check_restart(run_dir, is_resume=is_resume))
    agree(lambda: check_config(config))
    agree(lambda: check_kernels(recipe_of(config.recipe)))
    stem = config.settings.run.name or config.source.stem
    folder = agree(lambda: claim(stem, run_dir=run_dir, is_resume=is_resume, is_restart=is_restart))
    agree(lambda: _hold(stack, folder))
    if not is_restart:
        agree(lambda: check_checkpoints_are_there(folder, is_resume=is_resume))
    return folder


def _hold(stack: ExitStack, folder: RunFolder) -> None:
    """Hold the folder until the run ends.

    Raises:
        UserError: another job holds it, or it cannot be written to.
    """
    try:
        stack.enter_context(folder.locked())
    except OSError as error:
        message = (
            f"run folder {folder.path} cannot be written to ({error.strerror}): use another --run-dir, or "
            "make it writable"
        )
        raise file_system_error(message, error) from error


def _move_aside(folder: RunFolder) -> None:
    moved_to = move_aside(folder)
    if moved_to is not None:
        logger.warning("what was in %s has been moved to %s", folder.path, moved_to)


def _keep_records(folder: RunFolder) -> None:
    renamed = folder.rename_records()
    if renamed:
        logger.warning(
            "%s: the run died before its first checkpoint and begins at step 0; its records are kept as %s",
            folder.path, ", ".join(renamed),
        )  # fmt: skip


def _check_restart(run_dir: Path | None, *, is_resume: bool) -> None:
    if is_resume:
        raise UserError("--restart and --resume auto exclude each other: leave one of them out")
    if run_dir is None:
        raise UserError("--restart needs the run's folder: name it with --run-dir")
    check_restart(run_dir)


@contextmanager
def report_lost_ranks(identity: ProcessIdentity) -> Iterator[None]:
    """Say in one line where a collective has failed before the watchdog looks after that, and after."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_failed_collective(error):
            raise
        raise TransientError(
            f"rank {identity.rank} has lost another rank in {trace_of_error(error).text}, at the run's start "
            "or end: what ended that one is above, or in its node's log"
        ) from error


def _print_products(job: Job, console: Console) -> None:
    products = product_counts_of_all_stages(job)
    if job.recipe.gemm != "bf16" and products:
        console.print(products_line(products))


def start_facts(config: PretrainConfig, *, is_resume: bool, is_restart: bool = False) -> dict[str, str]:
    """What must be alike on all ranks before they do anything together."""
    return {
        **installation_facts(),
        "resume": str(is_resume),
        "restart": str(is_restart),
        **configuration_facts(config.parts),
        **{
            f"configuration key {name}": str(getattr(config.monitors, name)) for name in Monitors.model_fields
        },
    }


def _compare_with_saved(config: PretrainConfig, folder: RunFolder) -> list[str]:
    if not folder.is_started:  # then the checkpoint's own copy is compared
        return []
    saved = load_json(folder.config)
    check_is_configuration(saved, str(folder.config))
    return changed_settings(saved, config.to_dict())


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
        remember(model, remembered(job.engine.module))
    agree(lambda: save_hf(model, job.folder.hf, job.loader.tokenizer, whole=whole))
    console.print(f"HuggingFace checkpoint: {job.folder.hf}")


def product_counts_of_all_stages(job: Job) -> dict[str, dict[str, int]]:
    """What products have run in, in this process and in the other stages of its pipeline; collective."""
    grid = job.engine.process_grid
    place_here = (grid.data_rank, grid.tensor_rank)
    tables = gather((place_here, product_counts(job.engine.module)))
    return added_counts(counts for place, counts in tables if place == place_here)
