"""A run's history against one that is followed tick by tick, against hand-made cases, and against its sum."""

import math
import random
from collections import Counter

import pytest

from megalowbit.cluster.failures import FailureTrace, NodeFailures
from megalowbit.cluster.run_history import CAUSES, HOPELESS, RunCosts, simulate_run
from megalowbit.errors import UserError

TICKS = 16  # of a second


class Moments:
    """Failures that were chosen; after them none."""

    def __init__(self, *moments):
        self._moments = moments

    def moment(self, index):
        return self._moments[index] if index < len(self._moments) else 1e12 + index


def tick_by_tick(costs, interval, moments):
    """The same run, written as what happens in each tick; times in ticks, no two things at once."""
    struck = {round(moment * TICKS) for moment in moments}
    length = {
        "starts": costs.start, "detection": costs.detection, "queue": costs.requeue, "saves": costs.save,
    }  # fmt: skip
    ticks = {phase: round(seconds * TICKS) for phase, seconds in length.items()}
    limit = math.inf if costs.time_limit == math.inf else round((costs.time_limit - costs.notice) * TICKS)
    work, every = round(costs.work * TICKS), round(interval * TICKS)
    spent, clock, phase, left = Counter(), 0, "starts", ticks["starts"]
    saved = unsaved = job_began = 0
    jobs, failures, is_last_save = 1, 0, False
    while True:
        if clock in struck:
            struck.remove(clock)
            if phase in ("starts", "work", "saves"):
                failures += 1
                spent["work"] -= unsaved
                spent["lost work"] += unsaved
                unsaved, phase, left = 0, "detection", ticks["detection"]
        while phase != "work" and left == 0:  # what takes no time is over at once
            if phase == "saves":
                saved, unsaved = saved + unsaved, 0
                if saved == work:
                    return clock, spent, jobs, failures
                phase = "queue" if is_last_save else "work"
                is_last_save = False
            elif phase == "detection":
                phase = "queue"
            elif phase == "queue":
                phase, job_began, jobs = "starts", clock, jobs + 1
            else:
                phase = "work"
            left = ticks.get(phase, 0)
        is_told = clock - job_began >= limit
        if phase == "saves" and is_told:
            is_last_save = True
        if phase == "work":
            done = saved + unsaved
            if (done % every == 0 and unsaved) or done == work or is_told:
                phase, left, is_last_save = "saves", ticks["saves"], is_told
                continue
            unsaved += 1
        else:
            left -= 1
        spent[phase] += 1
        clock += 1


def test_a_simulated_run_equals_a_tick_by_tick_one_for_every_failure_cause():
    rng = random.Random(8)
    seen = Counter()
    for _ in range(200):
        limited = rng.random() < 0.5
        save = rng.randrange(1, 9)
        costs = RunCosts(
            work=rng.randrange(60, 200), save=save, start=rng.randrange(0, 12),
            detection=rng.randrange(0, 15), requeue=rng.randrange(0, 10),
            time_limit=rng.randrange(40, 90) if limited else math.inf, notice=save + rng.randrange(0, 6),
        )  # fmt: skip
        interval = rng.randrange(5, 60)
        moments, moment = [], 0
        for number in range(rng.randrange(0, 12)):
            moment += rng.randrange(1, 60)
            # a part of a second of its own: a failure never falls on the end of anything
            moments.append(moment + (number % (TICKS - 1) + 1) / TICKS)
        found = simulate_run(costs, interval, Moments(*moments))
        clock, spent, jobs, failures = tick_by_tick(costs, interval, moments)
        assert found.wall == clock / TICKS
        assert {cause: found.spent[cause] for cause in CAUSES} == {
            cause: spent[cause] / TICKS for cause in CAUSES
        }
        assert (found.trained, found.jobs, found.failures) == (costs.work, jobs, failures)
        seen.update(cause for cause in CAUSES if found.spent[cause])
        seen["limits"] += jobs - failures > 1
    assert min(seen[cause] for cause in (*CAUSES[:-1], "limits")) > 10


@pytest.mark.parametrize("shape", [1.0, 0.7])
def test_lost_and_useful_time_sum_to_the_total(shape):
    failures = NodeFailures(nodes=500, node_mtbf=2e6, shape=shape)
    costs = RunCosts(
        work=3e5,
        save=40,
        start=100,
        detection=300,
        requeue=30,
        time_limit=2e4,
        notice=90,
        spares=4,
        repair=2e4,
    )
    for seed in range(5):
        found = simulate_run(costs, 700.0, FailureTrace(failures, seed))
        assert found.trained + sum(found.spent.values()) == pytest.approx(found.wall, rel=1e-9)
        assert all(found.spent[cause] > 0 for cause in CAUSES)
        assert found.goodput == found.trained / found.wall


def test_without_failures_only_saves_and_the_first_start_cost():
    costs = RunCosts(work=1000, save=3, start=20, detection=50, requeue=60)
    found = simulate_run(costs, 300, Moments())
    assert found.wall == 1000 + 4 * 3 + 20  # the last save is at the end, 100 s after the third
    assert (found.jobs, found.failures) == (1, 0)


def test_a_failure_loses_what_was_trained_since_the_last_complete_save():
    costs = RunCosts(work=1000, save=10, start=20, detection=50, requeue=60)
    training = simulate_run(costs, 100, Moments(20 + 110 + 70))
    assert training.spent["lost work"] == 70
    saving = simulate_run(costs, 100, Moments(20 + 110 + 100 + 4))
    assert saving.spent["lost work"] == 100
    assert saving.spent["saves"] == 10 * 10 + 4
    assert saving.wall == training.wall + 30 + 4


def test_failures_between_attempts_cost_nothing():
    costs = RunCosts(work=1000, save=10, start=20, detection=50, requeue=60)
    once = simulate_run(costs, 100, Moments(200))
    again = simulate_run(costs, 100, Moments(200, 210, 299))
    assert (again.wall, again.failures) == (once.wall, 1)
    starting = simulate_run(costs, 100, Moments(200, 320))
    assert starting.wall == once.wall + 10 + 50 + 60
    assert starting.failures == 2


def test_a_job_saves_before_its_time_limit_and_the_next_one_resumes():
    costs = RunCosts(work=300, save=10, start=20, requeue=7, time_limit=200, notice=30)
    found = simulate_run(costs, 1000, Moments())
    # jobs train 150 and 150 seconds, and what is left is nothing
    assert (found.jobs, found.spent["saves"], found.spent["queue"]) == (2, 20, 7)
    assert found.wall == 300 + 20 + 7 + 2 * 20


def test_without_another_node_a_run_waits_for_the_repair():
    costs = {"work": 1000, "save": 10, "start": 20, "detection": 50, "requeue": 60, "repair": 500}
    always = simulate_run(RunCosts(**costs), 100, Moments(200, 400))
    none = simulate_run(RunCosts(**costs, spares=0), 100, Moments(200, 400))
    # the second failure comes while the run waits for the first node, and takes another until 900
    assert none.spent["spare nodes"] == 900 - (200 + 50 + 60)
    assert none.failures == 1
    one = simulate_run(RunCosts(**costs, spares=1), 100, Moments(200, 400))
    assert one.spent["spare nodes"] == 700 - (400 + 50 + 60)
    two = simulate_run(RunCosts(**costs, spares=2), 100, Moments(200, 400))
    assert two == always


def test_an_endless_wait_for_nodes_is_abandoned():
    # with 100 nodes broken at a time on average, none of them is never seen again
    costs = RunCosts(work=10000, save=10, spares=0, repair=10000)
    found = simulate_run(costs, 500, FailureTrace(NodeFailures(nodes=1, node_mtbf=100.0), 1))
    assert found.wall == HOPELESS * 10000
    assert found.failures == found.jobs == 1
    assert found.trained + sum(found.spent.values()) == pytest.approx(found.wall, rel=1e-12)
    assert found.spent["spare nodes"] > 0.99 * found.wall


def test_a_simulated_run_that_never_ends_is_abandoned():
    costs = RunCosts(work=1000, save=10)
    found = simulate_run(costs, 500, FailureTrace(NodeFailures(nodes=1, node_mtbf=20.0), 1))
    assert found.trained == 0
    assert HOPELESS * 1000 <= found.wall < HOPELESS * 1000 + 600


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"work": 0}, "work = 0 s"),
        ({"save": math.nan}, "save = nan s"),
        ({"start": -1}, "start = -1 s"),
        ({"spares": -1}, "spares = -1"),
        ({"time_limit": 30, "start": 20, "notice": 15}, "leaves no time to train after a start of 20 s"),
        ({"time_limit": 100, "notice": 5}, "a notice of 5 s is shorter than a save of 10 s"),
    ],
)
def test_impossible_costs_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        RunCosts(**{"work": 1000, "save": 10, **wrong})


@pytest.mark.parametrize("interval", [0, -1, math.nan, math.inf])
def test_impossible_intervals_are_refused(interval):
    with pytest.raises(UserError, match="interval"):
        simulate_run(RunCosts(work=10, save=1), interval, Moments())
