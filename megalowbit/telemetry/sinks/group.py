"""A group that forwards to several sinks, and the function that opens them.

Only the main process has sinks. Other processes get an empty group, so the loop needs no branch by rank.
TensorBoard, W&B and trackio are imported when their sink is created.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from megalowbit.records.files import LAYERS, METRICS
from megalowbit.telemetry.facts import Facts, check_facts
from megalowbit.telemetry.media import Medium
from megalowbit.telemetry.overflow.counters import LayerOverflow
from megalowbit.telemetry.settings import TensorBoardBlock, TrackioSettings, WandbSettings
from megalowbit.telemetry.sinks.base import Sink
from megalowbit.telemetry.sinks.jsonl import JsonlSink, LayerTableSink
from megalowbit.telemetry.sinks.tensorboard import TensorBoardSink
from megalowbit.telemetry.sinks.trackio import TrackioSink
from megalowbit.telemetry.sinks.wandb import WandbSink


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

    def write_media(self, step: int, media: Sequence[Medium]) -> None:
        """Record histograms and texts of `step` in every sink."""
        for sink in self.sinks:
            sink.write_media(step, media)

    def write_files(self, paths: Sequence[Path]) -> None:
        """Keep files that describe the whole run in every sink that stores files."""
        for sink in self.sinks:
            sink.write_files(paths)

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
    trackio: TrackioSettings | None = None,
    with_former_names: bool = True,
    run_name: str | None = None,
    config: Mapping[str, Any] | None = None,
    resume_step: int | None = None,
    resume_tokens: int = 0,
) -> SinkGroup:
    """Open a run's files: `metrics.jsonl`, and if enabled the table by layer, `tensorboard/` and trackers.

    Args:
        run_dir: the run's folder.
        is_main: whether this process records; others get an empty group.
        is_overflow: whether layers are counted; otherwise there is no `overflow_layers.jsonl`.
        is_tensorboard: `TelemetrySettings.tensorboard`; DeepSpeed's block switches it on as well.
        tensorboard: DeepSpeed's `tensorboard` block.
        wandb: DeepSpeed's `wandb` block.
        trackio: the section `megalowbit.trackio`.
        with_former_names: `TelemetrySettings.former_names`.
        run_name: name of the run in W&B and trackio.
        config: resolved configuration, shown by W&B and trackio.
        resume_step: last step that is already trained when a run is resumed; `None` for a new run.
        resume_tokens: tokens up to this step.
    """
    if not is_main:
        return SinkGroup()
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS, resume_step=resume_step)]
    if is_overflow:
        sinks.append(LayerTableSink(run_dir / LAYERS, resume_step=resume_step))
    tensorboard = tensorboard or TensorBoardBlock()
    if is_tensorboard or tensorboard.enabled:
        folder = tensorboard.folder(run_dir / "tensorboard")
        sinks.append(
            TensorBoardSink(
                folder,
                resume_step=resume_step,
                resume_tokens=resume_tokens,
                with_former_names=with_former_names,
            )
        )
    if wandb is not None and wandb.enabled:
        sinks.append(
            WandbSink(run_dir, wandb, run_name=run_name, config=config, with_former_names=with_former_names)
        )
    if trackio is not None and trackio.enabled:
        sinks.append(TrackioSink(run_dir, trackio, run_name=run_name, config=config))
    return SinkGroup(sinks)
