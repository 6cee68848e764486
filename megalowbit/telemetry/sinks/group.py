"""The protocol of a sink, a group that forwards to several sinks, and the function that opens them.

Only the main process has sinks. Other processes get an empty group, so the loop needs no branch by rank.
TensorBoard and W&B are imported when their sink is created.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megalowbit.telemetry.facts import Facts, check_facts
from megalowbit.telemetry.overflow.counters import LayerOverflow
from megalowbit.telemetry.settings import TensorBoardBlock, WandbSettings
from megalowbit.telemetry.sinks.jsonl import JsonlSink, LayerTableSink
from megalowbit.telemetry.sinks.tensorboard import TensorBoardSink
from megalowbit.telemetry.sinks.wandb import WandbSink


class Sink(Protocol):
    """Receives the facts of each step, in ascending order, and the table by layer for some steps."""

    def write(self, step: int, facts: Facts) -> None:
        """Record the facts of `step`."""

    def write_layers(self, step: int, layers: Sequence[LayerOverflow]) -> None:
        """Record the table after `step`; the facts of the step are written first."""

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:
        """Finish: `exit_code` is the run's, `summary` its final facts, for sinks that store them."""


class SinkGroup:
    """Forwards everything to other sinks; as a context manager it closes them, with 1 after an exception."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self.sinks = tuple(sinks)
        self._is_closed = False

    def write(self, step: int, facts: Facts) -> None:
        """Record the facts of `step` in every sink."""
        check_facts(facts)
        for sink in self.sinks:
            sink.write(step, facts)

    def write_layers(self, step: int, layers: Sequence[LayerOverflow]) -> None:
        """Record the table by layer in every sink."""
        for sink in self.sinks:
            sink.write_layers(step, layers)

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:
        """Close every sink, even if one fails; the first error is raised after all are closed."""
        if self._is_closed:
            return
        self._is_closed = True
        failures = []
        for sink in self.sinks:
            try:
                sink.close(exit_code, summary)
            except Exception as error:  # raised below, once the others are closed too
                failures.append(error)
        if failures:
            raise failures[0]

    def __enter__(self) -> SinkGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(exit_code=0 if kind is None else 1)


def open_sinks(
    run_dir: Path,
    *,
    is_main: bool,
    is_overflow: bool = True,
    is_tensorboard: bool = True,
    tensorboard: TensorBoardBlock | None = None,
    wandb: WandbSettings | None = None,
    run_name: str | None = None,
    config: Mapping[str, Any] | None = None,
    resume_step: int | None = None,
) -> SinkGroup:
    """Open a run's files: `metrics.jsonl` and, if enabled, the table by layer, `tensorboard/`, `wandb/`.

    Args:
        run_dir: the run's folder.
        is_main: whether this process records; others get an empty group.
        is_overflow: whether layers are counted; otherwise there is no `overflow_layers.jsonl`.
        is_tensorboard: `TelemetrySettings.tensorboard`; DeepSpeed's block switches it on as well.
        tensorboard: DeepSpeed's `tensorboard` block.
        wandb: DeepSpeed's `wandb` block.
        run_name: name of the run in W&B.
        config: resolved configuration, shown by W&B.
        resume_step: last step that is already trained when a run is resumed; `None` for a new run.
    """
    if not is_main:
        return SinkGroup()
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", resume_step=resume_step)]
    if is_overflow:
        sinks.append(LayerTableSink(run_dir / "overflow_layers.jsonl", resume_step=resume_step))
    tensorboard = tensorboard or TensorBoardBlock()
    if is_tensorboard or tensorboard.enabled:
        sinks.append(TensorBoardSink(tensorboard.folder(run_dir / "tensorboard"), resume_step=resume_step))
    if wandb is not None and wandb.enabled:
        sinks.append(WandbSink(run_dir, wandb, run_name=run_name, config=config))
    return SinkGroup(sinks)
