"""Names of the files in a run folder, and JSON objects in them.

Defined once: those who write a file and those who read it import the name. Names of files that are written
and read in one place only are there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object

CONFIG = "config.json"  # the resolved configuration
SAVED = "saved.json"  # that there was a checkpoint
SUMMARY = "summary.json"  # written at the end of training
DONE = "DONE"  # written after the export, last of all
REPORT = "report.html"
METRICS = "metrics.jsonl"
LAYERS = "overflow_layers.jsonl"
CHECKS = "speculation.jsonl"
ATTEMPTS, RANK_ATTEMPTS = "attempts.jsonl", "attempts-rank*.jsonl"


def object_if_any(path: Path, notes: list[str]) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no file, or if it is damaged, which is noted."""
    try:
        return read_json_object(path)
    except UserError as error:
        if os.path.lexists(path):
            notes.append(str(error))
        return {}
