"""Facts as JSON lines: one object per line, each step once, also after crashes and resumes.

JSON has no NaN and no infinity, and Python's spelling of them breaks other parsers. Such a value is written
as `null`, and the object gets an additional key with the original: `"nonfinite": {"loss": "nan"}`.

A run that is killed may leave an incomplete last line, and steps beyond its last checkpoint. Both are removed
when the run resumes; the file is replaced atomically, so a second crash at that moment loses nothing either.
If lines are missing, for example because the file was removed, a warning reports them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalowbit.durable_files import atomic_file, open_regular
from megalowbit.errors import UserError, file_system_error
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.sinks.base import Sink

if TYPE_CHECKING:  # it imports torch, and configurations are read without
    from megalowbit.telemetry.overflow.counters import LayerOverflow

logger = logging.getLogger(__name__)
MOST_GAPS_SHOWN = 5


class JsonlFile:
    """A file of JSON objects, each with an integer `step`.

    Args:
        path: the file; its folder is created.
        resume_step: keep lines up to and including this step; `None`: the file must not contain anything.

    Raises:
        UserError: the file is not empty although no run is resumed, or a line is damaged.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self.path = path
        self.last_step = -1
        self.kept_steps: set[int] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_fifo():  # opening it would block forever
            raise UserError(f"{path} is a FIFO, not a file: remove it, or choose another --run-dir")
        if path.exists() and path.stat().st_size:
            if resume_step is None:
                raise UserError(f"{path} already holds a run: choose another --run-dir or --resume auto")
            self._keep_up_to(resume_step)
        # line-buffered: a reader, or a kill, finds complete lines
        self._file = open_regular(path, "a", buffering=1)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one object as one line."""
        self._file.write(json.dumps(json_ready(record), allow_nan=False, ensure_ascii=False) + "\n")
        self.last_step = record["step"]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _keep_up_to(self, resume_step: int) -> None:
        with atomic_file(self.path) as draft:
            for step, line in _lines(self.path):
                if step <= resume_step:
                    draft.write(line)
                    self.kept_steps.add(step)
                    self.last_step = max(self.last_step, step)


class JsonlSink(Sink):
    """`metrics.jsonl`: one object per step, steps ascending, without duplicates; see `JsonlFile`."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._file = JsonlFile(path, resume_step=resume_step)
        if gaps := missing_steps(self._file.kept_steps, resume_step or 0):
            logger.warning(
                "%s lacks lines of steps already trained: %s; they were lost or removed",
                path, gaps,
            )  # fmt: skip

    def write(self, step: int, facts: Facts) -> None:
        """Write one line; the facts must be plain values."""
        if step <= self._file.last_step:
            raise ValueError(f"step {step} comes after step {self._file.last_step}: steps ascend")
        self._file.append({"step": step, **facts})

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:  # noqa: ARG002
        """Close the file; the summary has a separate file."""
        self._file.close()


class LayerTableSink(Sink):
    """`overflow_layers.jsonl`: for some steps, one object per layer and role. Arguments as of `JsonlFile`."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._file = JsonlFile(path, resume_step=resume_step)

    def write_layers(self, step: int, layers: Sequence[LayerOverflow]) -> None:
        """Write the table after `step`: counts over the run so far, and their rates."""
        if step <= self._file.last_step:
            raise ValueError(
                f"table of step {step} comes after that of step {self._file.last_step}: steps ascend"
            )
        for row in layers:
            counts = asdict(row.counts)
            self._file.append(
                {"step": step, "layer": row.layer, "role": row.role, **row.counts.rates(), **counts}
            )

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:  # noqa: ARG002
        """Close the file; the summary has a separate file."""
        self._file.close()


def json_ready(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` with NaN and infinities replaced by `None` and named under `nonfinite`, if there are any."""
    strange = {name: str(value) for name, value in record.items() if _is_nonfinite(value)}
    ready = {name: None if name in strange else value for name, value in record.items()}
    return ready | {"nonfinite": strange} if strange else ready


def missing_steps(present: Collection[int], last: int) -> str:
    """The missing steps from 1 to `last`: `"3, 7-9"`; of many gaps only the first."""
    gaps: list[list[int]] = []
    for step in range(1, last + 1):
        if step in present:
            continue
        if gaps and gaps[-1][1] == step - 1:
            gaps[-1][1] = step
        else:
            gaps.append([step, step])
    shown = [f"{first}" if first == end else f"{first}-{end}" for first, end in gaps[:MOST_GAPS_SHOWN]]
    return ", ".join([*shown, *(["…"] if len(gaps) > MOST_GAPS_SHOWN else [])])


def last_step(path: Path) -> int:
    """The highest step with a line in a file of records; 0 if there is no file or no line.

    Raises:
        UserError: a line of it is damaged, or it cannot be read.
    """
    if not path.is_file():
        return 0
    try:
        return max((step for step, _ in _lines(path)), default=0)
    except OSError as error:
        raise file_system_error(
            f"{path} cannot be read ({error.strerror}): make it readable", error
        ) from error


def _is_nonfinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Step and text of each complete line, without an incomplete last one."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise UserError(
                    f"{path} line {number} is damaged: fix or remove that line, then resume"
                ) from error
            yield step, line
