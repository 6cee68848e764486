"""`tools/goodput.py`: what it prints, what it refuses in one line, and that documented commands run."""

import json
import re
import shlex
import subprocess
import sys
import time

import pytest

from launchers import ROOT, check_refusal
from megalowbit.cluster.failures import NodeFailures
from megalowbit.cluster.goodput import failure_traces
from megalowbit.cluster.goodput_report import GoodputRequest, make_report, table
from megalowbit.cluster.run_history import RunCosts

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^python tools/goodput\.py (.+)$", PAGE.replace("\\\n", ""), re.MULTILINE)
FEW = ("--nodes", "64", "--node-mtbf-hours", "600", "--days", "3", "--runs", "20")


def goodput(*arguments):
    return subprocess.run(
        [sys.executable, "tools/goodput.py", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )


@pytest.fixture(scope="module")
def tool():
    """The tool as a module: its mistakes need no process each."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import goodput as module
    finally:
        sys.path.pop(0)
    return module


def in_this_process(tool, arguments, capsys):
    code = tool.main([*map(str, arguments)])
    printed = capsys.readouterr()
    return subprocess.CompletedProcess([], code, printed.out, printed.err)


def test_it_prints_the_computed_values():
    done = goodput(*FEW, "--save-seconds", 50, "--step-seconds", 4.5, "--every", 100, "--seed", 7)
    assert done.returncode == 0, done.stderr
    failures = NodeFailures(nodes=64, node_mtbf=600 * 3600.0)
    costs = RunCosts(
        work=3 * 86400.0, save=50.0, start=120.0, detection=30.0, requeue=60.0, notice=300.0, repair=86400.0
    )
    request = GoodputRequest(failures=failures, costs=costs, step_seconds=4.5, own=450.0)
    found = make_report(request, failure_traces(failures, runs=20, seed=7))
    assert done.stdout == table(found) + "\n"
    assert done.stdout.endswith(
        f"megalowbit.checkpoint.every = {request.steps(found.best.outcome.interval)}\n"
    )


def test_json_output_and_checkpoint_sizes():
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
    answer = json.loads(done.stdout)
    asked = {"save": 45, "time_limit": 28800, "notice": 90, "spares": 2, "repair": 43200, "shape": 0.8}
    assert {key: answer["asked"][key] for key in asked} == asked
    assert answer["intervals"]["yours"]["interval"] == 1800


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --nodes, --node-mtbf-hours; see --help"),
        (FEW, "give --save-seconds, or both --checkpoint-gib and --bandwidth-gib"),
        ((*FEW, "--save-seconds", 5, "--checkpoint-gib", 5), "give --save-seconds, or both"),
        ((*FEW, "--checkpoint-gib", 5), "give --save-seconds, or both"),
        ((*FEW, "--checkpoint-gib", 1e7, "--bandwidth-gib", 0.5), "--bandwidth-gib 0.5 is a save of 2e+07 s"),
        ((*FEW, "--save-seconds", "soon"), "invalid float value: 'soon'"),
        ((*FEW, "--save-seconds", 5, "--steps", 9), "add --step-seconds"),
        ((*FEW, "--save-seconds", 5, "--steps", 9, "--step-seconds", 1), "--days and --steps both"),
        ((*FEW[:4], "--save-seconds", 5, "--steps", 10**9, "--step-seconds", 4), "are 46,296 days of"),
        ((*FEW, "--save-seconds", 500, "--time-limit-hours", 4), "a notice of 300 s is shorter than a save"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, tool, capsys):
    check_refusal(in_this_process(tool, arguments, capsys), message)


@pytest.mark.parametrize(
    ("flag", "value", "bounds"),
    [
        ("--nodes", 0, "1 to 1,000,000"),
        ("--nodes", 10**400, "1 to 1,000,000"),
        ("--node-mtbf-hours", 0, "0.01 to 10,000,000"),
        ("--shape", 50, "0.1 to 10"),
        ("--save-seconds", "nan", "0.001 to 86,400"),
        ("--save-seconds", 1e-300, "0.001 to 86,400"),
        ("--checkpoint-gib", -1, "0.001 to 10,000,000"),
        ("--bandwidth-gib", 0, "0.001 to 1,000,000"),
        ("--start-seconds", 1e18, "0 to 86,400"),
        ("--detection-seconds", -1, "0 to 604,800"),
        ("--queue-seconds", "inf", "0 to 2,592,000"),
        ("--time-limit-hours", "nan", "0.01 to 87,600"),
        ("--notice-seconds", "nan", "0 to 86,400"),
        ("--spares", -1, "0 to 1,000,000"),
        ("--repair-hours", "1e+09", "0 to 87,600"),
        ("--days", 1e-9, "0.01 to 3,650"),
        ("--steps", 0, "1 to 1,000,000,000"),
        ("--step-seconds", 1e-300, "0.001 to 86,400"),
        ("--every", 0, "1 to 1,000,000,000"),
        ("--interval-minutes", 1e-300, "0.001 to 1,000,000"),
        ("--runs", 3, "10 to 10,000"),
        ("--runs", 10**8, "10 to 10,000"),
        ("--seed", -1, "0 to 4,294,967,295"),
    ],
)
def test_an_impossible_value_is_rejected_with_its_bounds(flag, value, bounds, tool, capsys):
    done = in_this_process(tool, (*FEW, "--save-seconds", 5, flag, value), capsys)
    check_refusal(done, f"error: {flag} ")
    if value != 10**400:
        assert f"{flag} {value} is not valid" in done.stderr
    assert done.stderr.endswith(f" is not valid: give {bounds}\n")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--node-mtbf-hours", 0.01), "of them failures: give fewer --days or --runs"),
        (("--runs", 10, "--days", 30, "--time-limit-hours", 0.12), "jobs: raise --time-limit-hours 0.12"),
        (("--nodes", 10**6, "--node-mtbf-hours", 10**7, "--shape", 0.7), "leave --shape 0.7 out"),
        (("--runs", 10**4, "--days", 30, "--spares", 0), "of them failures: give fewer --days or --runs"),
    ],
)  # fmt: skip
def test_a_simulation_that_would_take_too_long_is_rejected_at_once(arguments, reason, tool, capsys):
    began = time.process_time()
    done = in_this_process(tool, (*FEW, "--save-seconds", 5, *arguments), capsys)
    assert time.process_time() - began < 1
    check_refusal(done, "take too long to simulate")
    assert reason in done.stderr


@pytest.mark.slow
def test_all_accepted_extremes_end_in_a_table(tool, capsys):
    few = (*FEW[:4], "--runs", 10, "--save-seconds")
    began = time.process_time()
    for arguments in (
        (0.001,),
        (0.001, "--step-seconds", 0.001, "--every", 1),
        (40, "--spares", 0, "--repair-hours", 87600),
        (40, "--shape", 0.1),
        (40, "--days", 3650, "--step-seconds", 17000),  # whole steps are a little more
        (86400, "--interval-minutes", 10**6),
        (5, "--start-seconds", 86400, "--queue-seconds", 2592000, "--days", 0.01),
    ):
        done = in_this_process(tool, (*few, *arguments), capsys)
        assert (done.returncode, done.stderr) == (0, ""), arguments
        assert "best, simulated" in done.stdout
    assert time.process_time() - began < 20


def test_a_rejected_argument_also_ends_a_separate_process():
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
