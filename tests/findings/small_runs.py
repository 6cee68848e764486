"""Small run folders, written as a run writes them."""

import dataclasses
import json

from megalowbit.findings.run_files import read_run
from megalowbit.telemetry.sinks.jsonl import JsonlFile

LAYERS = [f"h.{block}.{kind}" for block in range(3) for kind in ("qkv", "proj", "up", "down")]
COUNTS = {
    "elements": 4096, "saturated": 130, "underflow": 250, "nonfinite": 0, "blocks": 256,
    "saturated_scales": 0,
    "zero_blocks": 0, "quantizations": 10, "nonfinite_quantizations": 0, "squared_error": 0.02,
}  # fmt: skip


@dataclasses.dataclass
class Records:
    """A healthy run of 60 steps; tests change its rows before they are written.

    Attributes:
        rows: of metrics.jsonl, step 1 first.
        tables: step → (layer, role) → counts since the table before.
        attempts: lines of attempts.jsonl.
        config: of config.json.
        is_done: whether the run has finished.
    """

    rows: list
    tables: dict
    attempts: list
    config: dict
    is_done: bool = True

    def write(self, folder):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        write_lines(folder / "metrics.jsonl", self.rows)
        write_lines(folder / "attempts.jsonl", self.attempts)
        totals, lines = {}, []
        for step, table in self.tables.items():
            for (layer, role), counts in table.items():
                total = totals.setdefault((layer, role), dict.fromkeys(counts, 0))
                totals[layer, role] = {name: total[name] + value for name, value in counts.items()}
                lines.append({"step": step, "layer": layer, "role": role, **totals[layer, role]})
        write_lines(folder / "overflow_layers.jsonl", lines)
        if self.is_done:
            (folder / "DONE").write_text("{}")
        return folder

    def read(self, folder):
        return read_run(self.write(folder))


def write_lines(path, rows):
    file = JsonlFile(path)
    for row in rows:
        file.append({"step": 0, **row})
    file.close()


def course(step, draw):
    """A loss that falls from 5.5 to about 3, with the noise of small batches."""
    return 3 + 2.5 * 0.93**step + draw.gauss(0, 0.04)


def begun(**more):
    return {"event": "begun", "time": 1.0, "host": "n1", "rank": 0, "processes": 1, "pid": 7, **more}


def ended(how, line="", **more):
    return {"event": "ended", "time": 2.0, "host": "n1", "rank": 0, "how": how, "line": line, **more}
