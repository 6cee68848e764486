"""The starts of a run's processes, of which `attempts.jsonl` has a line each, with their environment.

A run is trained in one or several attempts, on machines and with versions that may differ. Their losses are
in one file, so the report needs to say which part was made where.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ATTEMPTS = "attempts.jsonl"
BEGUN = "begun"  # event of a start


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
        if isinstance(record, dict) and record.get("event") == BEGUN:
            found.append(record)
    return found
