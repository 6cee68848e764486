"""What differs between runs, their environment and attempts, and their configurations."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megalowbit.records.files import ATTEMPTS
from megalowbit.records.run import BLOCK, RunRecords
from megalowbit.report.compare import differing_settings
from megalowbit.report.drawing.document import folded, paragraphs, table
from megalowbit.report.sections.curves import Drawing

LONGEST = 160  # characters of a value in a table
# of the line of an attempt: key → name in the table
ENVIRONMENT = {
    "host": "host",
    "device": "device",
    "processes": "processes",
    "layout": "layout",
    "megalowbit": "megalowbit",
    "code": "digest of the code",
    "python": "Python",
    "torch": "torch",
    "deepspeed": "deepspeed",
    "transformers": "transformers",
    "triton": "triton",
    "command": "command",
}


def differences(drawing: Drawing) -> str:
    """Settings and environments that are not equal in all runs."""
    runs = drawing.runs
    if len(runs) == 1:
        return ""
    found = differing_settings(runs)
    rows = [[key, *("–" if value is ... else value_text(value) for value in values)] for key, values in found]
    environments = [_environment(run) for run in runs]
    for key, name in ENVIRONMENT.items():
        values = [each.get(key, "–") for each in environments]
        if key != "command" and any(value != values[0] for value in values):
            rows.append([name, *values])
    if not rows:
        return paragraphs(["The configurations and the environments are equal."])
    return _text_table(["", *(run.label for run in runs)], rows)


def environment(drawing: Drawing) -> str:
    """Where and how each run was trained, its attempts, and the runs that it continues."""
    runs = drawing.runs
    facts = [{"folder": str(run.folder), **_environment(run)} for run in runs]
    names = {"folder": "folder", **ENVIRONMENT}
    rows = [
        [name, *(each.get(key, "–") for each in facts)]
        for key, name in names.items()
        if any(key in each for each in facts)
    ]
    drawn = _text_table(["", *(run.label if len(runs) > 1 else "last attempt" for run in runs)], rows)
    unknown = [run.label for run in runs if not run.attempts]
    if unknown:
        which = "" if len(runs) == 1 else f" of {', '.join(unknown)}"
        why = f"no line of {ATTEMPTS} says with what an attempt began, as in runs of earlier versions"
        drawn += paragraphs([f"The environment{which} is not known: {why}."], "note")
    for run in runs:
        lines = origins(run, runs)
        drawn += paragraphs([f"{run.label}: {line}" if len(runs) > 1 else line for line in lines])
        drawn += _attempts(run, has_name=len(runs) > 1)
    return drawn


def origins(run: RunRecords, runs: Sequence[RunRecords]) -> list[str]:
    """Sentences that name the run whose weights this one has started from, and those that start from it."""
    found = []
    start = run.setting(f"{BLOCK}.model.checkpoint")
    if isinstance(start, str):
        near = [other.label for other in runs if other is not run and is_within(Path(start), other.folder)]
        found.append(
            f"It starts from the weights in {start}" + (f", which are those of {near[0]}." if near else ".")
        )
    for other in runs:
        own = other.setting(f"{BLOCK}.model.checkpoint")
        if other is not run and isinstance(own, str) and is_within(Path(own), run.folder):
            found.append(f"{other.label} starts from its weights.")
    return found


def is_within(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or something in it."""
    try:
        return path.resolve().is_relative_to(folder)
    except (OSError, ValueError):  # not a name that a file can have
        return False


def _attempts(run: RunRecords, *, has_name: bool) -> str:
    """A row for each start, if there was more than one."""
    if len(run.attempts) < 2:
        return ""
    rows = []
    for attempt in run.attempts:
        after = attempt["step"]
        begun = "?" if after is None else f"after step {after:,}" if after else "from the start"
        where = (value_text(attempt.get(key, "–")) for key in ("host", "device", "layout"))
        rows.append([begun, _date(attempt["time"]), *where])
    name = escape(f"Attempts of {run.label}") if has_name else "Attempts"
    return f"<h3>{name}</h3>" + table(["trained", "started", "host", "device", "layout"], rows)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds)) if seconds else "?"


def _environment(run: RunRecords) -> dict[str, str]:
    last = run.attempts[-1] if run.attempts else {}
    return {key: value_text(last[key]) for key in ENVIRONMENT if last.get(key) is not None}


def configurations(drawing: Drawing) -> str:
    """The resolved configurations, folded."""
    return "".join(
        folded(
            f"Configuration of {run.label}",
            f"<pre>{escape(json.dumps(run.config, indent=2, ensure_ascii=False))}</pre>",
        )
        for run in drawing.runs
    )


def value_text(value: Any) -> str:
    """A value of a configuration on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, Mapping) and not value:
        text = "{}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-LONGEST // 2 :]}"


def _text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f'<div class="words">{table(head, rows)}</div>'
