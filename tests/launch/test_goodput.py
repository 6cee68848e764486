"""`tools/goodput.py`: what it prints, what it refuses in one line, and that documented commands run."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from launchers import ROOT, check_refusal
from megalowbit.cluster.failures import NodeFailures
from megalowbit.cluster.goodput import failure_traces
from megalowbit.cluster.goodput_report import Question, answer, table
from megalowbit.cluster.run_history import RunCosts

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^python tools/goodput\.py (.+)$", PAGE.replace("\\\n", ""), re.MULTILINE)
FEW = ("--nodes", "64", "--node-mtbf-hours", "600", "--days", "3", "--runs", "20")


def goodput(*arguments):
    return subprocess.run(
        [sys.executable, "tools/goodput.py", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )


def test_it_prints_what_was_computed():
    done = goodput(*FEW, "--save-seconds", 50, "--step-seconds", 4.5, "--every", 100, "--seed", 7)
    assert done.returncode == 0, done.stderr
    failures = NodeFailures(nodes=64, node_mtbf=600 * 3600.0)
    costs = RunCosts(
        work=3 * 86400.0, save=50.0, start=120.0, detection=600.0, requeue=60.0, notice=300.0, repair=86400.0
    )
    question = Question(failures=failures, costs=costs, step_seconds=4.5, own=450.0)
    found = answer(question, failure_traces(failures, runs=20, seed=7))
    assert done.stdout == table(found) + "\n"
    assert done.stdout.endswith(
        f"megalowbit.checkpoint.every = {question.steps(found.best.outcome.interval)}\n"
    )


def test_data_and_sizes_of_checkpoints():
    limit = (
        "--time-limit-hours",
        8,
        "--notice-seconds",
        90,
        "--spares",
        2,
        "--repair-hours",
        12,
        "--shape",
        0.8,
    )
    done = goodput(
        *FEW, "--checkpoint-gib", 900, "--bandwidth-gib", 20, "--json", *limit, "--interval-minutes", 30
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    asked = {"save": 45, "time_limit": 28800, "notice": 90, "spares": 2, "repair": 43200, "shape": 0.8}
    assert {key: told["asked"][key] for key in asked} == asked
    assert told["intervals"]["yours"]["interval"] == 1800


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --nodes, --node-mtbf-hours; see --help"),
        (FEW, "give --save-seconds, or both --checkpoint-gib and --bandwidth-gib"),
        ((*FEW, "--save-seconds", 5, "--checkpoint-gib", 5), "give --save-seconds, or both"),
        ((*FEW, "--checkpoint-gib", 5), "give --save-seconds, or both"),
        ((*FEW, "--checkpoint-gib", 5, "--bandwidth-gib", 0), "--bandwidth-gib 0 is not valid"),
        ((*FEW, "--save-seconds", "nan"), "save = nan s"),
        ((*FEW, "--save-seconds", "soon"), "invalid float value: 'soon'"),
        ((*FEW, "--save-seconds", 5, "--steps", 9), "add --step-seconds"),
        ((*FEW, "--save-seconds", 5, "--steps", 9, "--step-seconds", 1), "--days and --steps both"),
        ((*FEW, "--save-seconds", 5, "--every", 0, "--step-seconds", 1), "--every 0 is not valid"),
        ((*FEW, "--save-seconds", 5, "--runs", 3), "runs = 3"),
        ((*FEW, "--save-seconds", 5, "--node-mtbf-hours", 0), "node_mtbf = 0"),
        ((*FEW, "--save-seconds", 5, "--node-mtbf-hours", 0.001), "take too long to simulate"),
        ((*FEW, "--save-seconds", 500, "--time-limit-hours", 4), "a notice of 300 s is shorter than a save"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import goodput as tool
    finally:
        sys.path.pop(0)
    code = tool.main([*map(str, arguments)])
    printed = capsys.readouterr()
    check_refusal(subprocess.CompletedProcess([], code, printed.out, printed.err), message)


def test_a_refusal_is_one_in_a_process_too():
    check_refusal(goodput(*FEW, "--save-secs", 5), "--save-secs")


@pytest.mark.parametrize("command", DOCUMENTED)
def test_documented_commands_print_what_the_page_says(command):
    done = goodput(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    shown = [line.strip() for line in done.stdout.splitlines() if line]
    on_the_page = [line.strip() for line in PAGE.splitlines()]
    every = [line for line in shown if line.startswith(("best, simulated", "megalowbit.checkpoint.every"))]
    assert every
    assert all(line in on_the_page for line in every), done.stdout


def test_there_are_three_documented_commands():
    assert len(DOCUMENTED) == 3
