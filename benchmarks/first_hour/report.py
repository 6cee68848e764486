"""The folder of results: report.jsonl with a line per check, and summary.md, written after every step.

The row named `STEP` closes a step: its status is the worst of its checks, and its value the commit. A step is
done if the row has the device and the commit of the report. When it is run again, its old rows stay in the
file; the last ones count.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.first_hour.findings import STATUSES, Finding, number_text
from megalowbit.durable_files import atomic_file

STEP = "(step)"
WORST_FIRST = ("fail", "warn", "pass", "info", "skip")
MEANINGS = {
    "fail": "over the limit: a defect, or a prediction that is wrong",
    "warn": "works, but misses its goal",
    "skip": "not checked here; the note says why",
    "info": "measured, without a limit",
    "pass": "within the limit",
}

COLUMNS = {"step", "seconds", "device", *(each.name for each in fields(Finding))}
TEXTS = ("step", "check", "status", "limit", "note", "unit", "device")
TIMED = {
    " µs",
    " ms",
    " s",
    " TB/s",
    " TFLOP/s",
    " tokens/s",
    " ×",
    " × bf16",
}  # units of what a clock measures
NOISE = "CPU, noise"
NOISE_MEANS = (
    "These steps ran on a CPU, with sizes too small to time. They show that a step works, and say nothing of "
    "a GPU's speed or of this machine's."
)
GPU_FIGURES = "Each figure of a GPU is a median of rounds, with the clock and power at which it was taken."

Row = dict[str, Any]


class Report:
    """The rows of a folder.

    Attributes:
        folder: of the results.
        device: "cpu", or number and name of the GPUs.
        commit: of the code; in the rows that close a step.
    """

    def __init__(self, folder: Path, device: str = "", commit: str = "") -> None:
        self.folder, self.device, self.commit = folder, device, commit
        self.path = folder / "report.jsonl"

    def rows(self) -> list[Row]:
        """All rows so far, in order; damaged lines are left out, see `repair`."""
        return [row for row in self._lines().values() if row is not None]

    def repair(self) -> str | None:
        """Write the file again without damaged lines, and keep it as it was; returns what to say, or `None`.

        A process that is killed while it writes leaves a torn last line.
        """
        rows = self._lines()
        damaged = [number for number, row in rows.items() if row is None]
        if not damaged:
            return None
        count = len(list(self.folder.glob("report.damaged-*.jsonl")))
        kept = self.folder / f"report.damaged-{count + 1}.jsonl"
        self.path.rename(kept)
        self._write([row for row in rows.values() if row is not None])
        others = f" and {len(damaged) - 1} more" * (len(damaged) > 1)
        where = f"line {damaged[0]}{others} of {len(rows)}"
        return f"{self.path}: {where} cannot be read and is left out; {kept.name} has the whole file"

    def _lines(self) -> dict[int, Row | None]:
        """Line number → its row; `None`: it is no row."""
        if not self.path.exists():
            return {}
        *lines, torn = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        rows = {number: _row(line) for number, line in enumerate(lines, start=1)}
        return rows | ({len(lines) + 1: None} if torn else {})

    def _write(self, rows: list[Row]) -> None:
        with atomic_file(self.path) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def of_step(self, name: str) -> list[Row]:
        """The rows of a step's last attempt."""
        *closed, unfinished = self._attempts(name)
        return unfinished or (closed[-1] if closed else [])

    def _attempts(self, name: str) -> list[list[Row]]:
        """The rows of each attempt that was closed, in order, and then those that have come since."""
        attempts: list[list[Row]] = [[]]
        for row in self.rows():
            if row["step"] == name:
                attempts[-1].append(row)
                if row["check"] == STEP:
                    attempts.append([])
        return attempts

    def add(self, step: str, finding: Finding, seconds: float) -> None:
        """Append a row."""
        row = {"step": step, **asdict(finding), "seconds": round(seconds, 2), "device": self.device}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def close(self, step: str, seconds: float) -> str:
        """Close a step; returns its status."""
        found = {row["status"] for row in self._attempts(step)[-1]}
        status = next((each for each in WORST_FIRST if each in found), "skip")
        self.add(step, Finding(STEP, status, self.commit), seconds)  # type: ignore[arg-type]
        return status

    def counts(self, step: str) -> str:
        """How many checks of a step have which status, such as "3 pass, 4 skipped (no GPU)"."""
        rows = [row for row in self.of_step(step) if row["check"] != STEP]
        found = Counter(row["status"] for row in rows)
        reasons = {row["note"].partition(":")[0] for row in rows if row["status"] == "skip"}
        reason = reasons.pop() if len(reasons) == 1 else "summary.md says why"
        words = {"skip": f"skipped ({reason})"}
        parts = [f"{found[each]} {words.get(each, each)}" for each in WORST_FIRST if found[each]]
        return ", ".join(parts) or "nothing checked"

    def is_done(self, step: str) -> bool:
        """Whether a step has been closed, on this device and at this commit."""
        return self._closing_row(step) is not None and self.difference(step) is None

    def difference(self, step: str) -> str | None:
        """Where else a step has been closed; `None` if it was here, or never."""
        row = self._closing_row(step)
        if row is None or (row["device"], row["value"]) == (self.device, self.commit):
            return None
        if not row["device"] or row["value"] is None:
            return "by an earlier version of this tool, which did not keep the device"
        if row["device"] != self.device:
            return f"on another device ({row['device']}; this is {self.device})"
        return f"at another commit ({row['value']}; this is {self.commit})"

    def _closing_row(self, step: str) -> Row | None:
        rows = self.of_step(step)
        return rows[-1] if rows and rows[-1]["check"] == STEP else None

    def drop_unfinished(self, step: str) -> None:
        """Forget the rows of a step that was interrupted, to run it again."""
        rows = self.rows()
        closed = [n for n, row in enumerate(rows) if row["step"] == step and row["check"] == STEP]
        last = max(closed, default=-1)
        self._write([row for n, row in enumerate(rows) if row["step"] != step or n <= last])

    def write_summary(self, steps: dict[str, str]) -> Path:
        """summary.md: verdict, environment and one table. `steps` has the title of each step, in order."""
        rows = [row for name in steps for row in self.of_step(name) if row["check"] != STEP]
        counts = {status: sum(row["status"] == status for row in rows) for status in STATUSES}
        environment = self.folder / "environment.json"
        facts = json.loads(environment.read_text(encoding="utf-8")) if environment.exists() else {}
        lines = ["# First GPU hour", ""]
        lines += [f"- {counts[status]} {status}: {MEANINGS[status]}" for status in STATUSES]
        is_open = {name: self._closing_row(name) is None for name in steps}
        for words, has_rows in (("not finished", True), ("not run", False)):
            found = [t for name, t in steps.items() if is_open[name] and bool(self.of_step(name)) == has_rows]
            lines += [f"- {words}: {', '.join(found)}"] * bool(found)
        differences = {title: self.difference(name) for name, title in steps.items()}
        lines += [f"- {title} was done {where}" for title, where in differences.items() if where]
        if any(map(_is_noise, rows)):
            lines += ["", f"**Figures marked “{NOISE}” are no measurements.** {NOISE_MEANS}"]
        lines += ["", GPU_FIGURES, ""]
        lines += [
            "| step | check | value | limit | verdict | clock, power | note |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            _table_row(title, row) for name, title in steps.items() for row in rows if row["step"] == name
        ]
        lines += ["", "## Environment", "", "| | |", "|---|---|"]
        lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()]
        path = self.folder / "summary.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def _table_row(title: str, row: Row) -> str:
    state = NOISE if _is_noise(row) else ""
    if row["clock_mhz"] is not None:
        state = f"{row['clock_mhz']:.0f} MHz, {row['power_watts']:.0f} W"
    value = shown(row)
    verdict = f"**{row['status']}**" if row["status"] in ("fail", "warn") else row["status"]
    cells = (title, row["check"], value, row["limit"], verdict, state, row["note"])
    return f"| {' | '.join(map(_cell, cells))} |"


def shown(row: Row) -> str:
    """The value with its unit."""
    value = row["value"]
    if value is None:
        return ""
    if isinstance(value, float):
        value = number_text(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    return f"{value}{row['unit']}"


def _is_noise(row: Row) -> bool:
    return row["device"] == "cpu" and row["status"] == "info" and row["unit"] in TIMED


def _row(line: str) -> Row | None:
    """The row in a line; `None` if it is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and row.keys() == COLUMNS and _has_types(row) else None


def _has_types(row: Row) -> bool:
    """Whether each entry is what this file writes."""
    numbers = row["clock_mhz"], row["power_watts"]
    return (
        all(isinstance(row[name], str) for name in TEXTS)
        and row["status"] in STATUSES
        and isinstance(row["seconds"], (int, float))
        and (row["value"] is None or isinstance(row["value"], (int, float, str)))
        and (numbers == (None, None) or all(isinstance(each, (int, float)) for each in numbers))
    )


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
