"""Means over simulated runs against Daly's closed form, what must grow or fall with what, and the search."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megalowbit.cluster.failures import NodeFailures
from megalowbit.cluster.goodput import (
    NEAR,
    best_interval,
    expected_events,
    failure_traces,
    is_better,
    simulate,
)
from megalowbit.cluster.intervals import daly_interval, expected_seconds, young_interval
from megalowbit.cluster.run_history import CAUSES, HOPELESS, RunCosts, simulate_run
from megalowbit.errors import UserError

HOUR = 3600.0


def mean_and_error(values):
    return np.mean(values), np.std(values, ddof=1) / math.sqrt(len(values))


@pytest.mark.parametrize(
    ("mtbf", "save", "start", "pause", "interval"),
    [
        (4 * HOUR, 120, 600, 0, 3000),  # Daly's own model: all of a restart may be struck
        (HOUR, 300, 600, 0, 2000),  # far from rare failures
        (2 * HOUR, 60, 200, 900, 1000),  # most of a restart is queue, in which nothing is struck
    ],
)
def test_mean_time_is_that_of_dalys_model(mtbf, save, start, pause, interval):
    work = 100 * interval
    costs = RunCosts(work=work, save=save, start=start, detection=pause / 3, requeue=pause * 2 / 3)
    traces = failure_traces(NodeFailures(nodes=1, node_mtbf=mtbf), runs=400, seed=3)
    runs = [simulate_run(costs, interval, trace) for trace in traces]
    expected = expected_seconds(work, interval, save=save, mtbf=mtbf, start=start, pause=pause)
    # the model has no start at the beginning; ours may be struck as well
    first = (mtbf + pause) * math.expm1(start / mtbf)
    mean, error = mean_and_error([run.wall for run in runs])
    assert mean == pytest.approx(expected + first, abs=4 * error)
    assert error < 0.02 * expected


def test_many_nodes_equal_one_node_with_their_joint_failure_rate():
    costs = RunCosts(work=50 * HOUR, save=60, start=100, detection=300)
    of_one, of_many = (
        simulate(costs, 1500, failure_traces(NodeFailures(nodes=n, node_mtbf=n * 3 * HOUR), runs=200, seed=n))
        for n in (1, 1000)
    )
    assert of_one.low < of_many.high
    assert of_many.low < of_one.high
    assert of_many.failures == pytest.approx(of_many.wall / (3 * HOUR), rel=0.1)


def test_shares_and_goodput_sum_to_one():
    traces = failure_traces(NodeFailures(nodes=20, node_mtbf=100 * HOUR), runs=50, seed=0)
    costs = RunCosts(work=50 * HOUR, save=60, start=100, detection=300, requeue=60, spares=1, repair=3 * HOUR)
    found = simulate(costs, 1500, traces)
    assert set(found.shares) == set(CAUSES)
    assert found.goodput + sum(found.shares.values()) == pytest.approx(1, abs=1e-9)
    assert found.low < found.goodput < found.high
    assert found.given_up == 0


def test_goodput_falls_with_every_cost_and_every_failure():
    base = {"work": 100 * HOUR, "save": 100, "start": 200, "detection": 300, "requeue": 60}

    def goodput(nodes=100, shape=1.0, **changes):
        failures = NodeFailures(nodes=nodes, node_mtbf=300 * HOUR, shape=shape)
        traces = failure_traces(failures, runs=100, seed=5)
        return simulate(RunCosts(**{**base, **changes}), 2000, traces).goodput

    before = goodput()
    worse = [
        {"nodes": 200},
        {"save": 200},
        {"start": 400},
        {"detection": 600},
        {"requeue": 600},
        {"time_limit": 4 * HOUR, "notice": 120},
        {"spares": 2, "repair": 6 * HOUR},
    ]
    for change in worse:
        assert goodput(**change) < before - 0.002, change
    assert goodput(spares=50, repair=6 * HOUR) == before
    assert goodput(time_limit=200 * HOUR, notice=120) == pytest.approx(before, abs=1e-3)


def test_the_same_seed_is_the_same_answer_to_the_last_digit():
    failures = NodeFailures(nodes=64, node_mtbf=500 * HOUR, shape=0.8)
    costs = RunCosts(work=60 * HOUR, save=50, start=100, detection=300)
    first, again, other = (
        best_interval(costs, failures, failure_traces(failures, runs=30, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.outcome.goodput != other.outcome.goodput


@pytest.mark.parametrize(("mtbf", "save"), [(24 * HOUR, 300), (3 * HOUR, 60), (HOUR, 300)])
def test_the_search_agrees_with_dalys_formula_if_it_applies(mtbf, save):
    failures = NodeFailures(nodes=1, node_mtbf=mtbf)
    costs = RunCosts(work=100 * mtbf, save=save, start=300)
    traces = failure_traces(failures, runs=60, seed=1)
    found = best_interval(costs, failures, traces)
    formula = daly_interval(save, mtbf)
    assert formula / 1.5 < found.outcome.interval < formula * 1.5
    assert found.shortest <= formula <= found.longest
    assert found.is_dalys == (found.outcome.interval == formula)
    # the top is flat: what matters is that neither is worth less than the other
    of_formula = simulate(costs, formula, traces)
    assert of_formula.goodput <= found.outcome.goodput <= of_formula.goodput + NEAR / 2
    expected = costs.work / expected_seconds(costs.work, formula, save=save, mtbf=mtbf, start=300)
    assert of_formula.goodput == pytest.approx(expected, abs=0.01)
    if save > mtbf / 20:  # where saves are long, Young's interval is too long, and costs
        of_young = simulate(costs, young_interval(save, mtbf), traces)
        assert of_young.goodput < of_formula.goodput - 0.002


def test_an_interval_is_rounded_to_whole_steps_on_request():
    failures = NodeFailures(nodes=1, node_mtbf=3 * HOUR)
    costs = RunCosts(work=700 * 211.0, save=60)
    found = best_interval(
        costs,
        failures,
        failure_traces(failures, runs=20, seed=1),
        rounded=lambda seconds: max(1, round(seconds / 211)) * 211.0,
    )
    assert found.outcome.interval % 211 == 0
    assert found.outcome.interval / 211 == pytest.approx(young_interval(60, 3 * HOUR) / 211, abs=2)


def test_an_interval_that_meets_the_time_limit_is_found_to_be_worth_more_than_the_formulas():
    failures = NodeFailures(nodes=1, node_mtbf=100 * HOUR)
    formula = daly_interval(120, 100 * HOUR)
    # a job saves, and a moment later its limit makes it save again
    costs = RunCosts(work=400 * HOUR, save=120, start=60, time_limit=formula + 900, notice=150)
    traces = failure_traces(failures, runs=30, seed=1)
    found = best_interval(costs, failures, traces)
    assert not found.is_dalys
    assert found.outcome.goodput > simulate(costs, formula, traces).goodput + 0.005


def test_dalys_interval_is_kept_if_failures_are_rare():
    failures = NodeFailures(nodes=1, node_mtbf=6000 * HOUR)
    costs = RunCosts(work=300 * HOUR, save=20)
    found = best_interval(costs, failures, failure_traces(failures, runs=60, seed=1))
    assert found.is_dalys
    assert found.outcome.interval == daly_interval(20, 6000 * HOUR)


def test_an_interval_is_better_only_if_it_wins_consistently_over_runs():
    traces = failure_traces(NodeFailures(nodes=1, node_mtbf=9.0), runs=10, seed=1)
    some = simulate(RunCosts(work=1, save=1), 1, traces)

    def outcome(*each):
        return replace(some, each=each, failures=100.0)

    assert is_better(outcome(0.9, 0.8, 0.7), outcome(0.89, 0.79, 0.68))
    assert not is_better(outcome(0.9, 0.8, 0.7), outcome(0.91, 0.81, 0.40))
    assert not is_better(outcome(0.89, 0.79, 0.69), outcome(0.9, 0.8, 0.7))
    rarely = replace(outcome(0.9, 0.8, 0.7), failures=1.0)
    assert not is_better(rarely, outcome(0.89, 0.79, 0.68))


def test_a_hopeless_run_is_reported_as_such():
    failures = NodeFailures(nodes=100, node_mtbf=3 * HOUR)
    costs = RunCosts(work=HOUR, save=600, start=300)
    found = simulate(costs, 600, failure_traces(failures, runs=10, seed=1))
    assert found.given_up == 1
    assert found.goodput < 1 / HOPELESS


@pytest.mark.parametrize(
    ("nodes", "changes", "most"),
    [
        (64, {}, "failures"),
        (2048, {"start": 400}, "failures"),
        (64, {"time_limit": 1000, "notice": 90}, "jobs"),
        (64, {"time_limit": 400, "notice": 290, "start": 80}, "jobs"),
        (64, {"spares": 0, "repair": 30 * HOUR}, "failures"),
        (64, {"spares": 0, "repair": 80000 * HOUR}, "failures"),
        (1, {"work": HOUR}, "runs"),
    ],
)
def test_expected_numbers_of_events_are_close_to_the_simulated_ones(nodes, changes, most):
    failures = NodeFailures(nodes=nodes, node_mtbf=1200 * HOUR)
    costs = RunCosts(
        **{"work": 200 * HOUR, "save": 40, "start": 100, "detection": 300, "requeue": 60, **changes}
    )
    traces = failure_traces(failures, runs=20, seed=2)
    found = simulate(costs, min(costs.work, daly_interval(40, failures.mtbf)), traces)
    expected = expected_events(costs, failures, runs=20)
    assert max(expected, key=expected.get) == most
    # each moment until the end is looked at, and each job started
    moments = sum(next(i for i in range(10**6) if trace.moment(i) > found.wall) for trace in traces)
    assert moments * 0.9 - 50 <= expected["failures"] <= moments * 12 + 100
    assert 20 * (found.jobs - found.failures - 1) <= expected["jobs"] * 1.02 + 1
    assert expected["jobs"] <= 20 * found.jobs * 1.5


def test_node_lifetimes_are_counted_if_each_node_is_simulated():
    costs = RunCosts(work=HOUR, save=1)
    followed, not_followed = (
        expected_events(costs, NodeFailures(nodes=10**6, node_mtbf=1e12, shape=shape), runs=10)
        for shape in (0.7, 1.0)
    )
    assert followed["lives of nodes"] == 10**6
    assert not_followed["lives of nodes"] == 0


def test_too_few_runs_are_refused():
    with pytest.raises(UserError, match="runs = 9"):
        failure_traces(NodeFailures(nodes=1, node_mtbf=1.0), runs=9, seed=0)
