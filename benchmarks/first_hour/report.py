"""The folder of results: report.jsonl with a line per check, and summary.md, written after every step.

The row named `STEP` closes a step: its status is the worst of its checks. A step without it is not done.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.first_hour.findings import STATUSES, Finding
from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError

STEP = "(step)"
WORST_FIRST = ("fail", "warn", "pass", "info", "skip")
MEANINGS = {
    "fail": "over the limit: a defect, or a prediction that is wrong",
    "warn": "works, but misses its goal",
    "skip": "not checked here; the note says why",
    "info": "measured, without a limit",
    "pass": "within the limit",
}

Row = dict[str, Any]


class Report:
    """The rows of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "report.jsonl"

    def rows(self) -> list[Row]:
        """All rows so far, in order; a torn last line, of a process that was killed, is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        try:
            return [json.loads(line) for line in lines if line.endswith("\n")]
        except ValueError as error:
            raise UserError(f"{self.path} is damaged ({error}): remove it, or name another --out") from None

    def of_step(self, name: str) -> list[Row]:
        """The rows of a step."""
        return [row for row in self.rows() if row["step"] == name]

    def add(self, step: str, finding: Finding, seconds: float) -> None:
        """Append a row."""
        row = {"step": step, **asdict(finding), "seconds": round(seconds, 2)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self, step: str, seconds: float) -> str:
        """Close a step; returns its status."""
        found = {row["status"] for row in self.of_step(step)}
        status = next((each for each in WORST_FIRST if each in found), "skip")
        self.add(step, Finding(STEP, status), seconds)  # type: ignore[arg-type]
        return status

    def is_done(self, step: str) -> bool:
        """Whether a step has been closed."""
        return any(row["check"] == STEP for row in self.of_step(step))

    def drop(self, step: str) -> None:
        """Forget a step, to run it again."""
        kept = [row for row in self.rows() if row["step"] != step]
        with atomic_file(self.path) as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)

    def write_summary(self, steps: dict[str, str]) -> Path:
        """summary.md: verdict, environment and one table. `steps` has the title of each step, in order."""
        rows = [row for row in self.rows() if row["check"] != STEP]
        counts = {status: sum(row["status"] == status for row in rows) for status in STATUSES}
        environment = self.folder / "environment.json"
        facts = json.loads(environment.read_text(encoding="utf-8")) if environment.exists() else {}
        lines = ["# First GPU hour", ""]
        lines += [f"- {counts[status]} {status}: {MEANINGS[status]}" for status in STATUSES]
        missing = [title for name, title in steps.items() if not self.is_done(name)]
        lines += [f"- not run: {', '.join(missing)}"] * bool(missing)
        lines += [
            "",
            "Each figure of a GPU is a median of rounds, with the clock and power at which it was taken.",
            "",
        ]
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
    state = "" if row["clock_mhz"] is None else f"{row['clock_mhz']:.0f} MHz, {row['power_watts']:.0f} W"
    value = "" if row["value"] is None else row["value"]
    verdict = f"**{row['status']}**" if row["status"] in ("fail", "warn") else row["status"]
    cells = (title, row["check"], value, row["limit"], verdict, state, row["note"])
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
