"""Facts as TensorBoard scalars, histograms and texts; `names.py` has the tags.

TensorBoard stores scalars in float32: counts above 2^24 are rounded there, and exact in `metrics.jsonl`. Its
x axis is the step. The losses are also written over the number of tokens, as `train/loss vs tokens`, to files
in a folder `tokens`: when a run is resumed, TensorBoard hides all later events of a folder, whatever their
steps count.

Event files are written without torch's `SummaryWriter`, which passes events to a thread through a queue. If
Ctrl-C arrives right after the queue's lock is acquired, the lock is never released, and closing the writer
hangs. Here there is no thread and no lock, and one record per step.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalowbit.errors import UserError
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.media import (
    SECTION_OF_HISTOGRAMS,
    SECTION_OF_SAMPLES,
    Histogram,
    Medium,
    TextSample,
)
from megalowbit.telemetry.overflow.counters import LayerOverflow
from megalowbit.telemetry.sinks.base import Sink
from megalowbit.telemetry.sinks.names import AGAINST_TOKENS, named

PROMPT_ENDS = " ▶ "  # between prompt and continuation
FILE_VERSION = "brain.Event:2"  # of the format; TensorBoard hides steps by session marks from this one on


class TensorBoardSink(Sink):
    """Writes every numeric fact, histograms and texts; `None` has no curve.

    Args:
        folder: folder of the event files.
        resume_step: last step already trained; TensorBoard hides later events of an interrupted run.
        resume_tokens: tokens up to this step.
        with_former_names: also write metrics by their names in `metrics.jsonl`.

    Raises:
        UserError: the package `tensorboard` is not installed.
        OSError: the event file cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int | None = None,
        resume_tokens: int = 0,
        with_former_names: bool = False,
    ) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from torch.utils.tensorboard import RecordWriter
        except ImportError as error:
            raise UserError(
                "telemetry.tensorboard is on but tensorboard is not installed: pip install tensorboard, "
                "or set megalowbit.telemetry.tensorboard=false"
            ) from error
        self._events, self._summaries, self._tensors = event_pb2, summary_pb2, tensor_pb2
        self._string, self._writer = types_pb2.DT_STRING, RecordWriter
        self._with_former = with_former_names
        is_resumed = resume_step is not None
        self._records = self._open(folder, (resume_step or 0) + 1 if is_resumed else None)
        self._over_tokens: Any = None  # opened with its first event
        self._tokens_folder = folder / "tokens"
        self._next_tokens = resume_tokens + 1 if is_resumed else None

    def write(self, step: int, facts: Facts) -> None:
        """Add one scalar per numeric fact, and the losses over the number of tokens."""
        self._add_scalars(step, named(facts, with_former=self._with_former))
        self._records.flush()  # a kill costs nothing that was written
        tokens, renamed = facts.get("tokens"), named(facts)
        losses = {f"{name} vs tokens": renamed[name] for name in AGAINST_TOKENS if name in renamed}
        if isinstance(tokens, int) and losses:
            if self._over_tokens is None:
                self._over_tokens = self._open(self._tokens_folder, self._next_tokens)
            self._add_scalars(tokens, losses, self._over_tokens)
            self._over_tokens.flush()

    def write_layers(self, step: int, layers: Sequence[LayerOverflow]) -> None:
        """Add the curves of every layer and role."""
        for row in layers:
            self._add_scalars(step, row.facts())
        self._records.flush()

    def write_media(self, step: int, media: Sequence[Medium]) -> None:
        """Add histograms, and texts, each in a block of its own."""
        values = [
            self._histogram(each) if isinstance(each, Histogram) else self._text(each) for each in media
        ]
        if values:
            self._add(step=step, summary=self._summaries.Summary(value=values))
            self._records.flush()

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:  # noqa: ARG002
        """Flush and close the event files."""
        self._records.close()
        if self._over_tokens is not None:
            self._over_tokens.close()

    def _open(self, folder: Path, first_step: int | None) -> Any:
        """A new event file; `first_step` hides events from there on in earlier files of the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        records = self._writer((folder / _file_name()).open("xb"))
        self._add(records, file_version=FILE_VERSION)
        if first_step is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(records, step=first_step, session_log=start)
        records.flush()
        return records

    def _histogram(self, histogram: Histogram) -> Any:
        """Of edges and counts; sums are those of the middles of the bins."""
        edges, counts = histogram.edges, histogram.counts
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        found = [index for index, count in enumerate(counts) if count]
        made = self._summaries.HistogramProto(
            min=edges[found[0]] if found else 0.0,
            max=edges[found[-1] + 1] if found else 0.0,
            num=sum(counts),
            sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
            bucket_limit=edges[1:],
            bucket=counts,
        )
        return self._summaries.Summary.Value(tag=f"{SECTION_OF_HISTOGRAMS}/{histogram.name}", histo=made)

    def _text(self, sample: TextSample) -> Any:
        # an indented block is shown as it is, and not as Markdown or HTML
        lines = f"{sample.prompt}{PROMPT_ENDS}{sample.text}".splitlines() or [""]
        block = "\n".join(f"    {line}" for line in lines)
        kind = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        return self._summaries.Summary.Value(
            tag=f"{SECTION_OF_SAMPLES}/prompt {sample.number}",
            metadata=self._summaries.SummaryMetadata(plugin_data=kind),
            tensor=self._tensors.TensorProto(dtype=self._string, string_val=[block.encode()]),
        )

    def _add_scalars(self, step: int, facts: Facts, records: Any = None) -> None:
        value = self._summaries.Summary.Value
        scalars = [
            value(tag=name, simple_value=float(number))
            for name, number in facts.items()
            if isinstance(number, (int, float))
        ]
        if scalars:
            self._add(records, step=step, summary=self._summaries.Summary(value=scalars))

    def _add(self, records: Any = None, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        (records or self._records).write(event.SerializeToString())


def _file_name() -> str:
    """A name that TensorBoard recognises and sorts by time; nanoseconds make it unique."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
