"""Lines of a run's JSON files. They may hold anything, so each value is checked before it is used.

The run may still write, or was killed: a last line without an end is left out with a note, and is no damage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalowbit.errors import file_system_error
from megalowbit.values import counted

MOST_STEP = 2**53  # larger numbers are no steps of a run, and not exact as floats
LARGEST, SMALLEST = 1e60, 1e-60  # of figures: squares and ratios of others could not be computed


def is_regular(path: Path, notes: list[str]) -> bool:
    """Whether there is a file to read; opening a FIFO would wait for its writer."""
    if path.is_file():
        return True
    if path.exists():
        notes.append(f"{path.name} is not a regular file, so nothing of it is read")
    return False


def objects(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number and content of each complete line; None: it is damaged. A missing file has no lines.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        if not is_regular(path, notes):
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    notes.append(f"{path.name} ends in the middle of line {number}, which is left out")
                    return
                yield number, object_in(line)
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}): make it readable"
        raise file_system_error(message, error) from error


def object_in(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None: it is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def note_damage(path: Path, count: int, first: int | None, notes: list[str]) -> None:
    """Add a note about damaged lines, if there are any; `first`: the number of the first one, if known."""
    if count:
        where = "" if first is None else f", the first is line {first}"
        notes.append(f"{path.name}: {counted(count, 'damaged line')} left out{where}")


def step_in(row: dict[str, Any] | None) -> int | None:
    """The step of a line; None: it has none that a run can have."""
    step = None if row is None else row.get("step")
    return step if type(step) is int and 0 <= step < MOST_STEP else None


def number_of(value: Any, text: Any = None) -> float:
    """A recorded number; `text` is what was written instead of one that is not finite. Others are NaN.

    No figure of a run is near the ends of float64. Larger ones are infinite and smaller ones 0.
    """
    if value is None:
        return math.inf if text == "inf" else -math.inf if text == "-inf" else math.nan
    if not isinstance(value, (int, float)):
        return math.nan
    if abs(value) > LARGEST:  # compared as an integer of hundreds of digits, if it is one
        return math.inf if value > 0 else -math.inf
    return 0.0 if abs(value) < SMALLEST else float(value)
