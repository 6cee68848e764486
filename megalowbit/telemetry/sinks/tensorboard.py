"""Facts as TensorBoard scalars, with the facts' names as tags.

TensorBoard stores scalars in float32: counts above 2^24 are rounded there, and exact in `metrics.jsonl`.

Event files are written without torch's `SummaryWriter`, which passes events to a thread through a queue. If
Ctrl-C arrives right after the queue's lock is acquired, the lock is never released, and closing the writer
hangs. Here there is no thread and no lock, and one record per step.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalowbit.errors import UserError
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.overflow.counters import LayerOverflow

FILE_VERSION = "brain.Event:2"  # of the format; TensorBoard hides steps by session marks from this one on


class TensorBoardSink:
    """Writes every numeric fact; text and `None` have no curve.

    Args:
        folder: folder of the event files.
        resume_step: last step already trained; TensorBoard hides later events of an interrupted run.

    Raises:
        UserError: the package `tensorboard` is not installed.
        OSError: the event file cannot be created.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from torch.utils.tensorboard import RecordWriter
        except ImportError as error:
            raise UserError(
                "telemetry.tensorboard is on but tensorboard is not installed: pip install tensorboard, "
                "or set megalowbit.telemetry.tensorboard=false"
            ) from error
        self._events, self._summaries = event_pb2, summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        self._records = RecordWriter((folder / _file_name()).open("xb"))
        self._add(file_version=FILE_VERSION)
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=resume_step + 1, session_log=start)
        self._records.flush()

    def write(self, step: int, facts: Facts) -> None:
        """Add one scalar per numeric fact."""
        self._add_scalars(step, facts)
        self._records.flush()  # a kill costs nothing that was written

    def write_layers(self, step: int, layers: Sequence[LayerOverflow]) -> None:
        """Add the curves of every layer and role."""
        for row in layers:
            self._add_scalars(step, row.facts())
        self._records.flush()

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:  # noqa: ARG002
        """Flush and close the event file."""
        self._records.close()

    def _add_scalars(self, step: int, facts: Facts) -> None:
        value = self._summaries.Summary.Value
        scalars = [
            value(tag=name, simple_value=float(number))
            for name, number in facts.items()
            if isinstance(number, (int, float))
        ]
        if scalars:
            self._add(step=step, summary=self._summaries.Summary(value=scalars))

    def _add(self, **fields: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())


def _file_name() -> str:
    """A name that TensorBoard recognises and sorts by time; nanoseconds make it unique."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
