"""Runs of the tiny model that are broken on purpose are diagnosed with their cause, and healthy ones are not.

Each is a run of the real command line in processes of its own. `python tests/findings/broken_table.py` runs
all cases, held-out ones included, and prints the table of docs/diagnose.md.
"""

import json

import pytest
from broken_runs import HEALTHY, TUNED, named_right, start
from forks import run_script

from launchers import ROOT

pytestmark = pytest.mark.slow

BROKEN = (
    "lr-300", "no-warm-up", "lr-zero", "row", "nan-fp16", "nan-rank", "nan-activation", "noise-block",
    "slow-rank", "astray", "killed-rank", "killed", "hang", "memory", "disk", "time-limit", "deleted",
    "damaged",
)  # fmt: skip
SOUND = ("default", "fp16-high-scale", "two-ranks", "llama-mxfp4", "no-schedule", "short")


def diagnose(run, *options):
    """What `megalowbit diagnose RUN` prints in a process of its own."""
    return run_script(ROOT / "megalowbit" / "__main__.py", "diagnose", run, *options)


@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_of_a_broken_run_is_named_first_with_evidence_and_a_remedy(name, tmp_path):
    case = TUNED[name]
    done = diagnose(start(case, tmp_path / name, seed=1234), "--json")
    found = json.loads(done.stdout)
    assert named_right(case, found), done.stdout
    assert done.returncode == (0 if case.expected == "stopped" else 1)
    assert found["first"]["evidence"]
    assert found["first"]["remedy"]
    if name.startswith(("lr-", "no-warm-up")):
        assert any("--set optimizer.params.lr=" in remedy for remedy in found["first"]["remedy"])


@pytest.mark.parametrize("name", SOUND)
def test_a_healthy_run_is_healthy_with_exit_code_0(name, tmp_path):
    run = start(HEALTHY[name], tmp_path / name, seed=1234)
    done = diagnose(run)
    assert (done.returncode, done.stdout.splitlines()[0].partition(": ")[2][:7]) == (0, "healthy"), (
        done.stdout
    )
    assert done.stderr == ""


def test_the_line_of_a_run_that_fails_names_the_command(tmp_path):
    run = start(TUNED["disk"], tmp_path / "disk", seed=3)
    lines = (run.parent / "rank0.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("error: ")]
    assert lines.count("what went wrong first: megalowbit diagnose run") == 1
