"""`attempts.jsonl`: a line for each start of a run's processes, with its environment.

A run is trained in one or several attempts, on machines and with versions that may differ. Their losses are
in one file, so the report needs to say which part was made where.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalowbit.durable_files import open_regular

ATTEMPTS = "attempts.jsonl"


def add_attempt(run: Path, facts: Mapping[str, Any]) -> None:
    """Append a line; `facts` are plain values, with `after_step` among them.

    Raises:
        OSError: the file cannot be written.
        UserError: it is not a regular file.
    """
    with open_regular(run / ATTEMPTS, "a") as file:
        file.write(json.dumps(dict(facts), ensure_ascii=False, default=str) + "\n")


def read_attempts(run: Path) -> list[dict[str, Any]]:
    """The attempts of a run, the first one first; none for runs of versions that did not record them."""
    try:
        text = (run / ATTEMPTS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # a kill has interrupted the write
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
