"""The answer as a table and as data say the same, in whole steps, and leave out what does not hold."""

import json
import math

import pytest

from megalowbit.cluster.failures import NodeFailures
from megalowbit.cluster.goodput import failure_traces
from megalowbit.cluster.goodput_report import BEST, OWN, GoodputRequest, duration, make_report, table
from megalowbit.cluster.intervals import daly_interval, young_interval
from megalowbit.cluster.run_history import RunCosts

HOUR = 3600.0
FAILURES = NodeFailures(nodes=64, node_mtbf=600 * HOUR)


def ask(**changes):
    costs = {"work": 30000 * 4.0, "save": 50, "start": 100, "detection": 300, "requeue": 60}
    mine = {"failures": FAILURES, "costs": RunCosts(**costs), "step_seconds": 4.0, "own": 400.0}
    request = GoodputRequest(**{**mine, **changes})
    return make_report(request, failure_traces(request.failures, runs=20, seed=0))


def test_table_and_data_say_the_same():
    found = ask()
    answer, lines = found.to_dict(), table(found).splitlines()
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    assert answer["mtbf"] == 600 * HOUR / 64
    assert answer["asked"]["time_limit"] is None
    assert list(answer["intervals"]) == [BEST, "Young 1974", "Daly 2006, first order", "Daly 2006", OWN]
    for name, row in answer["intervals"].items():
        (line,) = [line for line in lines if line.startswith(f"{name}  ")]
        assert line.split()[-9:] == [
            *duration(row["interval"]).split(),
            f"{row['steps']:,}",
            *f"{100 * row['goodput']:.2f} ± {100 * (row['high'] - row['goodput']):.2f} %".split(),
            *f"{100 * row['expected_goodput']:.2f} %".split(),
        ]
        assert row["goodput"] == pytest.approx(row["expected_goodput"], abs=0.03)
    assert lines[-1] == f"megalowbit.checkpoint.every = {answer['best']['steps']}"


def test_intervals_are_whole_steps_next_to_the_formulas():
    answer = ask().to_dict()["intervals"]
    mtbf = FAILURES.mtbf
    assert answer["Young 1974"]["steps"] == round(young_interval(50, mtbf) / 4)
    assert answer["Daly 2006"]["steps"] == round(daly_interval(50, mtbf) / 4)
    assert answer[OWN]["steps"] == 100
    assert all(row["interval"] == 4 * row["steps"] for row in answer.values())


def test_no_steps_are_reported_if_none_are_known():
    found = ask(step_seconds=None, own=None)
    assert "steps" not in table(found)
    assert "checkpoint.every" not in table(found)
    assert found.to_dict()["best"]["steps"] is None
    assert OWN not in found.outcomes


@pytest.mark.parametrize("changes", [{"time_limit": 4 * HOUR, "notice": 99}, {"spares": 3, "repair": HOUR}])
def test_dalys_model_is_not_used_outside_its_assumptions(changes):
    request = GoodputRequest(failures=FAILURES, costs=RunCosts(work=1e5, save=50, **changes))
    assert request.expected_goodput(1000.0) is None
    found = make_report(request, failure_traces(FAILURES, runs=10, seed=0))
    assert "Daly's model" not in table(found)


def test_dalys_model_does_not_cover_a_weibull_shape():
    failures = NodeFailures(nodes=64, node_mtbf=600 * HOUR, shape=0.8)
    assert (
        GoodputRequest(failures=failures, costs=RunCosts(work=1e5, save=50)).expected_goodput(1000.0) is None
    )


def test_runs_that_never_end_are_marked():
    failures = NodeFailures(nodes=64, node_mtbf=6 * HOUR)
    found = ask(failures=failures, costs=RunCosts(work=2e4, save=600, start=600))
    assert "(100% never end)" in table(found)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.5, "1.5 s"), (119, "119 s"), (120, "2 min"), (1117.6, "18.6 min"), (11196, "3.11 h"),
     (172800, "2 days"), (22824000, "264 days")],
)  # fmt: skip
def test_durations_have_three_digits_and_a_unit_that_suits(seconds, text):
    assert duration(seconds) == text
    assert duration(seconds) != duration(seconds * 1.1 + 1)


def test_infinity_is_not_written_to_json():
    assert math.inf not in ask().to_dict()["asked"].values()


def test_an_interval_longer_than_a_job_is_not_recommended():
    costs = RunCosts(
        work=200 * HOUR, save=40, start=100, detection=300, requeue=60, time_limit=HOUR, notice=60
    )
    found = ask(costs=costs, failures=NodeFailures(nodes=2, node_mtbf=60000 * HOUR), own=None)
    assert found.best.outcome.interval >= HOUR
    *_, said, every = table(found).splitlines()
    assert said.startswith("the save at the end of each job is enough")
    assert int(every.removeprefix("megalowbit.checkpoint.every = ")) * 4.0 <= HOUR
