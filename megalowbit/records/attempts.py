"""`attempts.jsonl`: the begin and end of each attempt at a run, with its environment.

A run is trained in one or several attempts, on machines and with versions that may differ. The main process
writes this file, and another rank that ends by an error writes `attempts-rank<r>.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalowbit.records.files import ATTEMPTS, RANK_ATTEMPTS
from megalowbit.records.lines import note_damage, objects, step_in

BEGUN, ENDED = "begun", "ended"  # events
MOST_PROCESSES = 2**31
LAST_SECOND = 253402300799.0  # of the year 9999


def read_attempts(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The lines of all ranks by time; none for runs of versions that did not record them.

    Damage is added to `notes`.
    Each has `file`, its file's name; `time`, 0 if it is none; `step` and `processes`, None if they are none
    that a run can have.

    Raises:
        UserError: a file cannot be read.
    """
    lines = []
    for path in (folder / ATTEMPTS, *sorted(folder.glob(RANK_ATTEMPTS))):
        damaged = []
        for number, line in objects(path, notes):
            if line is None or not isinstance(line.get("event"), str):
                damaged.append(number)
            elif line["event"] in (BEGUN, ENDED):  # a later version may write others
                lines.append(_checked(line) | {"file": path.name})
        note_damage(path, len(damaged), damaged[0] if damaged else None, notes)
    return sorted(lines, key=lambda line: line["time"])


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    moment, size = line.get("time"), line.get("processes")
    is_time = isinstance(moment, (int, float)) and 0 <= moment < LAST_SECOND
    return {
        **line,
        "time": float(moment) if is_time and moment is not None else 0.0,
        "step": step_in(line),
        "processes": size if type(size) is int and 1 <= size < MOST_PROCESSES else None,
    }
