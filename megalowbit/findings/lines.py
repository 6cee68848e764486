"""Lines of a run's JSON files. They may hold anything, so each value is checked before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalowbit.errors import file_system_error

MOST_STEP = 2**53  # larger numbers are no steps of a run, and not exact as floats
LARGEST = 1e60  # of figures: squares and ratios of larger ones could not be computed


def objects(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number and content of each complete line; None: it is damaged. A missing file has no lines.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        if not path.is_file():  # opening a FIFO would wait for its writer
            if path.exists():
                notes.append(f"{path.name} is not a regular file, so nothing of it is read")
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    notes.append(f"{path.name} ends in the middle of line {number}, which is left out")
                    return
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    found = None
                yield number, found if isinstance(found, dict) else None
    except OSError as error:
        raise file_system_error(
            f"{path} cannot be read ({error.strerror}): make it readable", error
        ) from error


def step_in(row: dict[str, Any] | None) -> int | None:
    """The step of a line; None: it has none that a run can have."""
    step = None if row is None else row.get("step")
    return step if type(step) is int and 0 <= step < MOST_STEP else None


def number_of(value: Any, text: Any = None) -> float:
    """A recorded number; `text` is what was written instead of one that is not finite. Others are NaN."""
    if value is None:
        return math.inf if text == "inf" else -math.inf if text == "-inf" else math.nan
    if not isinstance(value, (int, float)):
        return math.nan
    if abs(value) > LARGEST:  # compared as an integer of hundreds of digits, if it is one
        return math.inf if value > 0 else -math.inf
    return float(value)
