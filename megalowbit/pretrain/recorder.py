"""All records of a run behind one object: console, metrics, layer table, summary.

The loop tells it what happened; it knows which file that belongs to and which process writes. Records by
layer need an all-reduce, so their calls are for every rank.
"""

from __future__ import annotations

from types import TracebackType

from megalowbit.pretrain.job import Job
from megalowbit.telemetry.console import Console
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.jsonl import LayerTableFile
from megalowbit.telemetry.moving_rate import MovingRate
from megalowbit.telemetry.sinks import SinkGroup, open_sinks
from megalowbit.telemetry.summary import RunSummary


class Recorder:
    """Writes what a run does; as a context it closes its files, marked as failed after an exception.

    Args:
        job: the run.
        console: where a person follows it.
        is_main: whether this process writes.
        resume_step: last step already trained when a run is resumed; `None` for a new run.
    """

    def __init__(self, job: Job, console: Console, *, is_main: bool, resume_step: int | None) -> None:
        self._job, self._console, self._is_main = job, console, is_main
        self._every = job.config.settings.telemetry.layers_every
        self._speed = MovingRate()
        files = open_sinks(
            job.folder.path,
            is_main=is_main,
            is_tensorboard=job.config.settings.telemetry.tensorboard,
            tensorboard=job.config.monitors.tensorboard,
            wandb=job.config.monitors.wandb,
            run_name=job.folder.path.name,
            config=job.config.to_dict(),
            resume_step=resume_step,
        )
        self._sinks = SinkGroup([*files.sinks, console])
        has_table = is_main and job.tracker is not None
        self._table = LayerTableFile(job.folder.layers, resume_step=resume_step) if has_table else None

    def step(self, facts: Facts) -> None:
        """Record one step. Every rank must call it."""
        self._speed.add(self._job.tokens_per_step)
        self._sinks.write(self._job.step, facts)
        if self._every and self._job.step % self._every == 0:
            self._write_layers()

    def finish(self) -> None:
        """Write and show the summary. Every rank must call it."""
        job = self._job
        if job.tracker is not None and not (self._every and job.step % self._every == 0):
            self._write_layers()
        summary = RunSummary.build(
            job.totals,
            tokens_per_second=self._speed.average,
            overflow=job.tracker.run if job.tracker is not None else None,
            layers=job.tracker.reduce_layers() if job.tracker is not None else (),
        )
        self._sinks.close(summary=summary.facts())
        if self._is_main:
            summary.write(job.folder.summary)
            self._console.print(summary.render())

    def _write_layers(self) -> None:
        if self._job.tracker is None:
            return
        layers = self._job.tracker.reduce_layers()
        if self._table is not None:
            self._table.write(self._job.step, layers)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sinks.close(exit_code=0 if kind is None else 1)
        if self._table is not None:
            self._table.close()
