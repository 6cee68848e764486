"""A run from its first check to its export; every rank calls `pretrain` once.

All checks come before anything is written. The folder stays locked until the run ends, and the mark of a
finished run (`DONE`) is written last. The training loop is in `loop.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megalowbit.config.deepspeed_json import load_json
from megalowbit.data.cache.build_lines import reported_builds
from megalowbit.data.settings import BPE_TOKENIZER
from megalowbit.distributed.agreement import agree, gather, raised_on_all_ranks, succeed_together
from megalowbit.distributed.process_group import ProcessIdentity, is_true_anywhere
from megalowbit.durable_files import steps_in
from megalowbit.engine.parameters.full_weights import full_state_dict
from megalowbit.engine.pipeline.setup import gather_weights
from megalowbit.engine.process_start import (
    compute_deterministically,
    naming_nondeterministic_operations,
    start_process_group,
)
from megalowbit.engine.run_checks.ranks_agree import (
    check_ranks_agree,
    configuration_facts,
    installation_facts,
)
from megalowbit.errors import LAUNCHER, LOST, TransientError, UserError, file_system_error
from megalowbit.hf.folders.model_card import model_card
from megalowbit.hf.generation import store_generation, stored_generation
from megalowbit.hf.model import random_model, save_hf
from megalowbit.layers.conversion.convert import added_counts, product_counts
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.checks import check_config, check_kernels, check_start_tokenizer, check_tokenizer
from megalowbit.pretrain.components.late_switch import LateSwitchSettings, kept_switch
from megalowbit.pretrain.config import Monitors, PretrainConfig
from megalowbit.pretrain.job import Job, assemble
from megalowbit.pretrain.loop import Ending, train
from megalowbit.pretrain.records.lines import products_line, startup_lines
from megalowbit.pretrain.records.page import attempt_facts
from megalowbit.pretrain.records.recorder import Recorder
from megalowbit.pretrain.resume import changed_settings, check_is_configuration
from megalowbit.pretrain.run_folder.attempts import AttemptRecord
from megalowbit.pretrain.run_folder.folder import RunFolder, claim
from megalowbit.pretrain.run_folder.lost_checkpoints import check_checkpoints_are_there
from megalowbit.pretrain.run_folder.restart import check_restart, move_aside
from megalowbit.pretrain.stopping.signals import pending_stop_signal
from megalowbit.supervision.collective_trace import is_failed_collective, trace_of_error
from megalowbit.supervision.watchdog import Watchdog, print_error
from megalowbit.telemetry.settings import BAR, PLAIN, RICH
from megalowbit.telemetry.sinks.console import Console
from megalowbit.telemetry.sinks.dashboard import Dashboard

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
    ui: str = BAR,
) -> None:
    """Train until `run.steps`; every rank calls this once.

    Args:
        config: the resolved configuration.
        identity: this process.
        run_dir: the folder the user named; None: a new folder.
        is_resume: whether an existing run may be continued.
        is_restart: whether an existing run in `run_dir` is moved aside; cannot be combined with `is_resume`.
        report: prints why the watchdog ends this process; see `Watchdog`.
        at_first_step: called before the first step; from then on the loop polls for stop signals.
        has_launcher_ended: called after a stop, to find out whether the launcher's end caused it; None: the
            launcher is not watched.
        ui: what a terminal shows, one of `telemetry.settings.UIS`.

    Raises:
        TransientError: a rank was lost, hangs or cannot be reached, or the launcher has ended before its
            ranks.
        UserError: configuration, data or folders are invalid, or training cannot continue.
    """
    with ExitStack() as stack:
        stack.enter_context(report_lost_ranks(identity))
        if config.settings.run.deterministic:
            compute_deterministically()
        start_process_group(identity)
        folder = _lock_folder(stack, config, run_dir=run_dir, is_resume=is_resume, is_restart=is_restart)
        changes = agree(lambda: _compare_with_saved(config, folder)) if is_resume else []
        attempt = stack.enter_context(AttemptRecord(folder.path, identity))
        stack.enter_context(report_lost_ranks(identity))  # again: the record gets the error with its line
        # on the rank that builds files, once for a cache
        with reported_builds(partial(print, flush=True), is_first=identity.local_rank == 0):
            job = assemble(config, identity, folder, is_resume=is_resume)
        attempt.step = lambda: job.step
        consoles: list[Console] = []
        settings, end = config.parts.settings.watchdog, partial(_end_by_watchdog, attempt, consoles, report)
        watchdog = Watchdog(settings, identity, folder=folder.path, report=end)
        stack.enter_context(watchdog)
        watchdog.mark("the load of a checkpoint")
        is_resumed = is_resume and job.resume()
        has_bpe = config.settings.data.tokenizer == BPE_TOKENIZER
        if not is_resumed and (has_bpe or is_resume):  # not known before: a BPE, whether a checkpoint is used
            agree(lambda: check_start_tokenizer(config, job.loader.tokenizer))
        succeed_together(job.plan_data)
        if is_restart or (is_resume and not is_resumed):
            agree(lambda: _move_aside(folder) if is_restart else _keep_records(folder))
        console = _console(job, identity, ui)
        consoles.append(console)
        console.print(startup_lines(job, identity, is_resumed=is_resumed, changes=changes))
        if at_first_step is not None:
            at_first_step()
        has_summary = agree(lambda: folder.has_summary_of(job.step))  # a kill after the last step leaves none
        facts = attempt_facts(job) if identity.is_main else {}
        begin = partial(attempt.begin, is_resumed=is_resumed, facts=facts)
        if job.step >= config.settings.run.steps and has_summary:
            succeed_together(begin)
            console.print(_how_to_continue(config, job.step))
        else:
            recorder = Recorder(job, console, is_main=identity.is_main, is_resume=is_resume)
            succeed_together(begin)  # nothing is written before all records are open
            if _train(job, recorder, watchdog, has_launcher_ended) is Ending.STOPPED:
                attempt.is_stopped, attempt.stopped_by = True, pending_stop_signal()
                return
            _print_products(job, console)
        watchdog.mark("the export", is_save=True)
        export(job, console)
        watchdog.finish()
        agree(lambda: folder.mark_done(job.step))


def _how_to_continue(config: PretrainConfig, step: int) -> str:
    settings = config.settings
    switch = kept_switch(settings.of(LateSwitchSettings), settings.run.steps)
    return f"nothing left to do: raise megalowbit.run.steps above {step} to continue{switch}"


def _end_by_watchdog(
    attempt: AttemptRecord,
    consoles: Sequence[Console],
    report: Callable[[UserError], None],
    error: UserError,
) -> None:
    """Say and record why the watchdog ends this process; `consoles` is empty before the console is there."""
    attempt.name_folder(error)
    for console in consoles:
        console.release()
    report(error)  # before the record: writing to a disk may hang
    attempt.fail(error)


def _train(
    job: Job, recorder: Recorder, watchdog: Watchdog, has_launcher_ended: Callable[[], bool] | None
) -> Ending:
    with recorder, naming_nondeterministic_operations():
        ending = train(job, recorder, watchdog)
        if ending is Ending.STOPPED:
            agree(recorder.check_folder)
            _raise_if_launcher_ended(has_launcher_ended, job.step)
            for component in job.components:
                recorder.log(component.stop(job.step))
            recorder.log(f"stopped after step {job.step} on request: continue with --resume auto")
        else:
            watchdog.mark("the summary and the report", is_save=True)
            recorder.finish()
    return ending


def _console(job: Job, identity: ProcessIdentity, ui: str) -> Console:
    options: dict[str, Any] = {
        "log_every": job.config.settings.telemetry.log_every,
        "start_step": job.step,
        "skipped_steps": job.totals.skipped_steps,
        "is_main": identity.is_main,
    }
    steps = job.config.settings.run.steps
    if ui == RICH:
        return Dashboard(f"{job.folder.path.name} · {job.recipe.name}", steps, **options)
    return Console(steps, has_bar=ui != PLAIN, **options)


def _raise_if_launcher_ended(has_ended: Callable[[], bool] | None, step: int) -> None:
    """Raise a transient error if the launcher has ended: another attempt may continue the run; collective."""
    if is_true_anywhere(has_ended is not None and has_ended()):
        raise raised_on_all_ranks(
            f"the launcher has ended before its ranks: saved after step {step}, continue with --resume auto",
            is_transient=True,
            fault=LAUNCHER,
        )


def _lock_folder(
    stack: ExitStack, config: PretrainConfig, *, run_dir: Path | None, is_resume: bool, is_restart: bool
) -> RunFolder:
    """Check everything that needs no model; then create the run folder and lock it until the run ends."""
    check_ranks_agree(start_facts(config, is_resume=is_resume, is_restart=is_restart))
    if is_restart:
        agree(lambda: _check_restart(run_dir, is_resume=is_resume))
    agree(lambda: check_config(config))
    is_start = not (is_resume and run_dir is not None and steps_in(RunFolder(run_dir).checkpoints))
    agree(lambda: check_tokenizer(config, is_start=is_start))
    agree(lambda: check_kernels(recipe_of(config.recipe)))
    stem = config.settings.run.name or config.source.stem
    folder = agree(lambda: claim(stem, run_dir=run_dir, is_resume=is_resume, is_restart=is_restart))
    agree(lambda: _hold(stack, folder))
    if not is_restart:
        agree(lambda: check_checkpoints_are_there(folder, is_resume=is_resume))
    return folder


def _hold(stack: ExitStack, folder: RunFolder) -> None:
    """Lock the folder until the run ends.

    Raises:
        UserError: another job holds the lock, or the folder cannot be written to.
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
        logger.warning("moved the files of the run in %s to %s", folder.path, moved_to)


def _keep_records(folder: RunFolder) -> None:
    renamed = folder.rename_records()
    if renamed:
        logger.warning(
            "%s: the run died before its first checkpoint and restarts at step 0; its records are kept as %s",
            folder.path, ", ".join(renamed),
        )  # fmt: skip


def _check_restart(run_dir: Path | None, *, is_resume: bool) -> None:
    if is_resume:
        raise UserError("--restart and --resume auto cannot be combined: leave one of them out")
    if run_dir is None:
        raise UserError("--restart needs a run folder: name it with --run-dir")
    check_restart(run_dir)


@contextmanager
def report_lost_ranks(identity: ProcessIdentity) -> Iterator[None]:
    """Turn a failed collective into a one-line `TransientError` before and after the watchdog's block."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_failed_collective(error):
            raise
        raise TransientError(
            f"rank {identity.rank} has lost another rank in {trace_of_error(error).text}, at the start or "
            "end of the run: the cause is above, or in the log of that rank's node",
            fault=LOST,
        ) from error


def _print_products(job: Job, console: Console) -> None:
    products = product_counts_of_all_stages(job)
    if products and any(each.gemm != "bf16" for each in job.recipe.variants):
        console.print(products_line(products))


def start_facts(config: PretrainConfig, *, is_resume: bool, is_restart: bool = False) -> dict[str, str]:
    """Facts that must be equal on all ranks before any other collective."""
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
    if not folder.is_started:  # the configuration in the checkpoint is compared instead, see Job.load
        return []
    saved = load_json(folder.config)
    check_is_configuration(saved, str(folder.config))
    return changed_settings(saved, config.to_dict())


def export(job: Job, console: Console) -> None:
    """Write the final model to `hf/` as an ordinary Hugging Face checkpoint, if enabled and not yet there."""
    # rank 0 decides: others could see the folder after it has begun to write, and skip the collectives below
    if not job.config.settings.checkpoint.export_hf or agree(job.folder.hf.exists):
        return
    model = job.engine.module
    is_in_parts = job.engine.process_grid.tensor_size > 1 or job.engine.zero_optimization_stage() == 3
    whole = full_state_dict(job.engine) if is_in_parts else None
    if job.is_pipeline:  # no stage has all layers: save the gathered weights with an empty model
        whole = gather_weights(model)
        model = random_model(model.config, seed=0, device="meta")
        store_generation(model, stored_generation(job.engine.module))
    weights = (model.state_dict() if whole is None else whole).values()
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in weights})
    card = model_card(job.facts_for_card(), job.recipe.name, dtype=", ".join(dtypes))
    agree(lambda: save_hf(model, job.folder.hf, job.loader.tokenizer, whole=whole, card=card))
    console.print(f"Hugging Face checkpoint: {job.folder.hf}")


def product_counts_of_all_stages(job: Job) -> dict[str, dict[str, int]]:
    """The precisions in which products have run, over all stages of this process's pipeline; collective."""
    grid = job.engine.process_grid
    place_here = (grid.data_rank, grid.tensor_rank)
    tables = gather((place_here, product_counts(job.engine.module)))
    return added_counts(counts for place, counts in tables if place == place_here)
