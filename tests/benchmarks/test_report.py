"""The benchmark of the report: records are repeated with ascending steps, and a page is made of them."""

import json
import re

from forks import run_script
from made_runs import write_checks, write_layers, write_run

from benchmarks.report import lengthen
from launchers import ROOT


def test_records_are_repeated_in_blocks_of_a_step(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "n": n}) + "\n" for step in (10, 20) for n in (step, step + 1))
    )
    lengthen(path, 50)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in found] == [10, 10, 20, 20, 30, 30, 40, 40, 50, 50]
    assert [row["n"] for row in found] == [10, 11, 20, 21, 10, 11, 20, 21, 10, 11]


def test_the_benchmark_prints_size_and_time(tmp_path):
    run = write_run(tmp_path / "run", 20)
    write_layers(run, steps=20, every=10, layers=2)
    write_checks(run, steps=20, layers=2)
    done = run_script(ROOT / "benchmarks" / "report.py", run, "--steps", "300")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^report\.html +0\.\d+ MB\n300 steps: [0-9.]+ s, [0-9.]+ s of CPU$", done.stdout, re.MULTILINE
    )
