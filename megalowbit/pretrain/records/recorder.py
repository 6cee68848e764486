"""The recorder: writes the console, metrics, layer table, components' records and summary of a run.

Every rank calls it and the main process writes. Per-layer records need an all-reduce, so all ranks must make
those calls. The counters of spectral splits are those of the main process only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType

from megalowbit.distributed.agreement import agree
from megalowbit.errors import UserError, file_system_error
from megalowbit.layers.conversion.carried_state import split_counts
from megalowbit.pretrain.components.base import Component
from megalowbit.pretrain.job import Job
from megalowbit.pretrain.records.lines import splits_line
from megalowbit.pretrain.records.page import write_page
from megalowbit.records.files import METRICS, REPORT
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.moving_rate import MovingRate
from megalowbit.telemetry.sinks.console import Console
from megalowbit.telemetry.sinks.group import SinkGroup, open_sinks
from megalowbit.telemetry.sinks.jsonl import last_step
from megalowbit.telemetry.summary import RunSummary, worst_layers

logger = logging.getLogger(__name__)

FAR_ABOVE = 1.5  # times the loss of a model that guesses all tokens alike
HIGH_LOSS_WARNING = (
    "the last loss is %.3g, and guessing has %.3g: `megalowbit diagnose %s` says what came first, and what "
    "to do"
)
MISFIT_WARNING = (
    "splits: %s times the kept factors did not fit the next matrix (different rank, dtype or number of rows) "
    "and were computed again: the settings have changed, or batches have different sizes"
)


class Recorder:
    """Writes the records of a run; as a context manager it closes its files, marked as failed after an error.

    Args:
        job: the run.
        console: the console to print to.
        is_main: whether this process writes.
        is_resume: whether the folder may have records of an earlier part of the run; lines after the
            current step are removed.

    Raises:
        UserError: a file cannot be opened; every rank raises it.
    """

    def __init__(self, job: Job, console: Console, *, is_main: bool, is_resume: bool) -> None:
        self._job, self._console, self._is_main = job, console, is_main
        self._every = job.config.settings.telemetry.layers_every
        self._speed = MovingRate()
        self._sinks = SinkGroup([console])
        self._table_step = job.step if is_resume else 0  # step of the newest per-layer table
        agree(lambda: self._open(job.step if is_resume else None))

    def _open(self, resume_step: int | None) -> None:
        """Open the files on the main process; this marks the folder as that of a run."""
        if not self._is_main:
            return
        job, telemetry = self._job, self._job.config.settings.telemetry
        try:
            self._check_records(resume_step)
            files = open_sinks(
                job.folder.path,
                is_main=True,
                is_overflow=job.tracker is not None,
                is_tensorboard=telemetry.tensorboard,
                tensorboard=job.config.monitors.tensorboard,
                wandb=job.config.monitors.wandb,
                trackio=job.config.settings.trackio,
                with_former_names=telemetry.former_names,
                run_name=job.folder.path.name,
                config=job.config.to_dict(),
                resume_step=resume_step,
                resume_tokens=job.totals.tokens,
            )
            for component in job.components:
                component.open_records(job.folder.path, resume_step)
            job.loader.tokenizer.save_pretrained(job.folder.tokenizer)
            job.folder.rename_export(job.step)
            job.folder.done.unlink(missing_ok=True)
            job.folder.note_saved(job.step or None)
            job.folder.write_config(job.config.to_dict())
        except OSError as error:
            raise file_system_error(
                f"the run cannot be recorded in {error.filename or job.folder.path} ({error.strerror}): "
                "free space, move the file away, or choose another --run-dir",
                error,
            ) from error
        self._sinks = SinkGroup([*files.sinks, self._console])

    def _check_records(self, resume_step: int | None) -> None:
        """Check all records before any is truncated: a damaged one must not leave the others truncated."""
        if resume_step is None:
            return
        for name in (METRICS, *(name for each in self._job.components for name in each.records)):
            last_step(self._job.folder.path / name)

    def roll_back(self) -> None:
        """Remove the lines of steps after the job's step, which a rollback has lowered. Every rank calls it.

        Raises:
            UserError: a file cannot be opened again; every rank raises it.
        """
        agree(self._open_again)

    def _open_again(self) -> None:
        files = SinkGroup(sink for sink in self._sinks.sinks if sink is not self._console)
        self._sinks = SinkGroup([self._console])  # the console is not rolled back
        with self._recording():
            self._close_components()
            files.close()
        self._open(self._job.step)

    def step(self, facts: Facts) -> None:
        """Record one step. Every rank must call it."""
        step, last = self._job.step, self._job.config.settings.run.steps
        self._speed.add(self._job.tokens_per_step)
        self._notice_lost_folder()
        with self._recording():
            self._sinks.write(step, facts)
        # also at the last step, before its checkpoint: a kill after the checkpoint must not lose the table
        if step == last or (self._every and step % self._every == 0):
            self._write_layers()

    def _notice_lost_folder(self) -> None:
        """Ask all ranks to save and stop if somebody has deleted the run folder.

        Open records go on being written without an error, into files that nobody can find.
        """
        job = self._job
        if not self._is_main or job.is_folder_lost or job.folder.config.exists():
            return
        job.is_folder_lost = True
        logger.warning(
            "step %d: the run folder %s has been deleted or moved: its records and checkpoints are gone. All "
            "ranks save a checkpoint there after the next step, and stop", job.step, job.folder.path,
        )  # fmt: skip

    def check_folder(self) -> None:
        """Check that the folder was not lost; called on the main process.

        Raises:
            UserError: it was.
        """
        job = self._job
        if job.is_folder_lost:
            raise UserError(
                f"the run folder {job.folder.path} was deleted or moved while the run wrote to it: the "
                f"checkpoint of step {job.step} was saved there, and earlier records are lost; put a moved "
                "folder back, with this checkpoint in it, or continue with --resume auto as it is"
            )

    def follow(self, component: Component, facts: Facts) -> None:
        """Call a component's `after_step`, record its media and print the lines that it returns."""
        with self._recording():
            lines = tuple(component.after_step(self._job.step, facts))
            if self._is_main and (media := component.media()):
                self._sinks.write_media(self._job.step, media)
        for line in lines:
            self.log(line)

    def sync(self) -> None:
        """Flush the records to disk: like a checkpoint, they then survive a power failure."""
        if self._is_main:
            with self._recording():
                self._job.folder.sync_records()

    def log(self, text: str | None) -> None:
        """Print a line on the console; `None` prints nothing."""
        if text is not None:
            with self._recording():  # stdout may be a file on a full disk
                self._console.print(text, "bold")

    def finish(self) -> None:
        """Write and print the summary. Every rank must call it."""
        job = self._job
        if self._table_step != job.step:
            self._write_layers()
        splits = split_counts(job.engine.module)
        parts = [component.summary() for component in job.components]
        entries = {name: value for part in parts for name, value in part.entries.items()}
        tracker = job.tracker
        summary = RunSummary(
            totals=job.totals,
            tokens_per_second=self._speed.average,
            timed_steps=self._speed.steps,
            overflow=None if tracker is None else tracker.run,
            counted_steps=0 if tracker is None else tracker.counted_steps,
            worst=() if tracker is None else worst_layers(tracker.reduce_layers()),
            entries={"splits": splits, **entries} if splits else entries,
            rows=[part.row for part in parts if part.row is not None],
        )
        page_line = agree(lambda: self._close(summary))
        if self._is_main:
            self._console.print(summary.render())
            for line in (*(part.line for part in parts), splits_line(splits), page_line):
                if line is not None:
                    self._console.print(line)
            self._warn_of_a_high_loss()
            if splits.get("misfit"):
                logger.warning(MISFIT_WARNING, f"{splits['misfit']:,}")

    def _warn_of_a_high_loss(self) -> None:
        last, guessing = self._job.totals.final_loss, math.log(self._job.engine.module.config.vocab_size)
        if last is not None and not last <= FAR_ABOVE * guessing:
            logger.warning(HIGH_LOSS_WARNING, last, guessing, self._job.folder.path)

    def _write_layers(self) -> None:
        if self._job.tracker is None:
            return
        self._table_step, layers = self._job.step, self._job.tracker.reduce_layers()
        with self._recording():
            self._sinks.write_layers(self._job.step, layers)

    def _close(self, summary: RunSummary) -> str | None:
        """On the main process: write summary and report, pass files about the whole run on, close the files.

        Returns:
            A line about the report.
        """
        with self._recording():
            page_line = None
            if self._is_main:
                summary.write(self._job.folder.summary)
                page_line = write_page(self._job)
            page = self._job.folder.path / REPORT  # W&B and trackio keep it
            self._sinks.write_files([page] if page.is_file() else [])
            self._sinks.close(summary=summary.facts())
        return page_line

    def _close_components(self) -> None:
        for component in self._job.components:
            component.close_records()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Turn an error of the file system, such as a full disk, into a one-line `UserError`."""
        try:
            yield
        except OSError as error:
            path = self._job.folder.path
            steps = self._job.store.steps()
            saved = f"from the checkpoint of step {steps[-1]}" if steps else "from the start"
            raise file_system_error(
                f"the run cannot be recorded in {path} ({error.strerror or error}): free space or fix the "
                f"disk, then continue {saved} with --resume auto",
                error,
            ) from error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # on a full disk, closing fails again; that error must not replace the first one
        with nullcontext() if kind is None else suppress(OSError):
            self._sinks.close(exit_code=0 if kind is None else 1)
        with nullcontext() if kind is None else suppress(OSError):
            self._close_components()
