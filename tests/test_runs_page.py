"""docs/runs.md explains every column of the console and every field that recorded runs have written."""

import json
import re
from pathlib import Path

from megalowbit.telemetry import columns

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
FIGURES = PAGE[PAGE.index("## The figures") :].split("\n## ")[0]
ROWS = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in re.findall(r"^\|.*", FIGURES, re.M)]
PLACEHOLDER = re.compile(r"<\w+>")


def explained_fields():
    cells = [row[1 if len(row) == 3 and row[0].strip("| `") in titles() else 0] for row in ROWS]
    return [name for cell in cells for name in re.findall(r"`([\w/<>]+)`", cell)]


def titles():
    return columns.heading(100, {columns.MFU.fact: 0.4}).split()


def test_every_column_of_the_console_is_explained_with_its_field():
    fields = {row[0].strip("`"): row[1].strip("`") for row in ROWS if row[0].strip("`") in titles()}
    assert list(fields) == titles()
    shown = (*columns.COLUMNS, columns.MFU)
    assert {each.title: each.fact for each in shown}.items() <= fields.items()


def test_every_field_of_recorded_runs_is_explained():
    names = json.loads((ROOT / "tests" / "launch" / "golden_names.json").read_text(encoding="utf-8"))
    text = json.dumps(names)
    recorded = set(re.findall(r'"metrics\.jsonl/([^"]+)"', text))
    patterns = [PLACEHOLDER.sub(r"\\w+", name) for name in explained_fields()]
    assert len(recorded) > 30
    assert not [name for name in recorded if not any(re.fullmatch(each, name) for each in patterns)]


def test_every_explained_field_is_written_by_the_code():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "megalowbit").rglob("*.py"))
    lasts = [PLACEHOLDER.sub("", name).rsplit("/", 1)[-1] for name in explained_fields()]
    assert not [last for last in lasts if last not in source]
