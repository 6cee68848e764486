"""All records of a run behind one object: console, metrics, layer table, records of components, summary.

The loop tells it what happened; it knows which file that belongs to and which process writes. Records by
layer need an all-reduce, so their calls are for every rank. Counts of splits are the main process's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType

from megalowbit.distributed.agreement import agree
from megalowbit.errors import file_system_error
from megalowbit.layers.carried_state import split_counts
from megalowbit.pretrain.components.base import Component
from megalowbit.pretrain.job import Job
from megalowbit.pretrain.records.lines import splits_line
from megalowbit.pretrain.run_folder.folder import METRICS
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.moving_rate import MovingRate
from megalowbit.telemetry.sinks.console import Console
from megalowbit.telemetry.sinks.group import SinkGroup, open_sinks
from megalowbit.telemetry.sinks.jsonl import last_step
from megalowbit.telemetry.summary import RunSummary, worst_layers

logger = logging.getLogger(__name__)

MISFIT_WARNING = (
    "splits: %s times what was kept did not fit the next matrix (another rank, dtype or number of rows), "
    "and factors were found anew: the settings were changed, or batches have different sizes"
)


class Recorder:
    """Writes what a run does; as a context it closes its files, marked as failed after an exception.

    Args:
        job: the run.
        console: where a person follows it.
        is_main: whether this process writes.
        is_resume: whether records of an earlier part of the run may be there; later steps are dropped.

    Raises:
        UserError: a file cannot be opened; every rank raises it.
    """

    def __init__(self, job: Job, console: Console, *, is_main: bool, is_resume: bool) -> None:
        self._job, self._console, self._is_main = job, console, is_main
        self._every = job.config.settings.telemetry.layers_every
        self._speed = MovingRate()
        self._sinks = SinkGroup([console])
        self._table_step = job.step if is_resume else 0  # of the newest table by layer
        agree(lambda: self._open(job.step if is_resume else None))

    def _open(self, resume_step: int | None) -> None:
        """Open the files, on the main process; only then is the folder this run's own."""
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
                run_name=job.folder.path.name,
                config=job.config.to_dict(),
                resume_step=resume_step,
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
                "free space or move away what is there, or choose another --run-dir",
                error,
            ) from error
        self._sinks = SinkGroup([*files.sinks, self._console])

    def _check_records(self, resume_step: int | None) -> None:
        """Read all records that are to be continued: one that is damaged must not leave the others cut."""
        if resume_step is None:
            return
        for name in (METRICS, *(name for each in self._job.components for name in each.records)):
            last_step(self._job.folder.path / name)

    def roll_back(self) -> None:
        """Drop what was recorded after the job's step, which has become an earlier one. Every rank calls it.

        Raises:
            UserError: a file cannot be opened again; every rank raises it.
        """
        agree(self._open_again)

    def _open_again(self) -> None:
        files = SinkGroup(sink for sink in self._sinks.sinks if sink is not self._console)
        self._sinks = SinkGroup([self._console])  # the run goes on, and so does what a person sees
        with self._recording():
            self._close_components()
            files.close()
        self._open(self._job.step)

    def step(self, facts: Facts) -> None:
        """Record one step. Every rank must call it."""
        step, last = self._job.step, self._job.config.settings.run.steps
        self._speed.add(self._job.tokens_per_step)
        with self._recording():
            self._sinks.write(step, facts)
        # the last one before the last checkpoint, or a kill in between would leave the run without it
        if step == last or (self._every and step % self._every == 0):
            self._write_layers()

    def follow(self, component: Component, facts: Facts) -> None:
        """Let a component record the step just recorded, and show what it has to say."""
        with self._recording():
            lines = tuple(component.after_step(self._job.step, facts))
        for line in lines:
            self.log(line)

    def sync(self) -> None:
        """Make what was recorded survive a power failure, as a checkpoint does."""
        if self._is_main:
            with self._recording():
                self._job.folder.sync_records()

    def log(self, text: str | None) -> None:
        """Show a line to whoever follows the run; `None` is no line."""
        if text is not None:
            with self._recording():  # logs lie on disks too
                self._console.print(text, "bold")

    def finish(self) -> None:
        """Write and show the summary. Every rank must call it."""
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
            overflow=None if tracker is None else tracker.run,
            worst=() if tracker is None else worst_layers(tracker.reduce_layers()),
            entries={"splits": splits, **entries} if splits else entries,
            rows=[part.row for part in parts if part.row is not None],
        )
        agree(lambda: self._close(summary))
        if self._is_main:
            self._console.print(summary.render())
            for line in (*(part.line for part in parts), splits_line(splits)):
                if line is not None:
                    self._console.print(line)
            if splits.get("misfit"):
                logger.warning(MISFIT_WARNING, f"{splits['misfit']:,}")

    def _write_layers(self) -> None:
        if self._job.tracker is None:
            return
        self._table_step, layers = self._job.step, self._job.tracker.reduce_layers()
        with self._recording():
            self._sinks.write_layers(self._job.step, layers)

    def _close(self, summary: RunSummary) -> None:
        """Leave the summary, on the main process, and close the files."""
        with self._recording():
            self._sinks.close(summary=summary.facts())
            if self._is_main:
                summary.write(self._job.folder.summary)

    def _close_components(self) -> None:
        for component in self._job.components:
            component.close_records()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Say in one line that a disk is full, or what else keeps the records from being written."""
        try:
            yield
        except OSError as error:
            path = self._job.folder.path
            steps = self._job.store.steps()
            saved = f"from the checkpoint of step {steps[-1]}" if steps else "from the start"
            raise file_system_error(
                f"the run cannot be recorded in {path} ({error.strerror or error}): free space or mend the "
                f"disk, then go on {saved} with --resume auto",
                error,
            ) from error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # on a full disk closing fails again, and would hide why the run ends
        with nullcontext() if kind is None else suppress(OSError):
            self._sinks.close(exit_code=0 if kind is None else 1)
        with nullcontext() if kind is None else suppress(OSError):
            self._close_components()
