"""Simulates the goodput of a run (training time / wall time) and finds the best interval between saves.

Many runs are simulated (`run_history`), each with different failures. All candidate intervals are compared on
the same failures, which removes the random differences between them. Goodput changes little near the
optimum, so Daly's interval is kept unless another one is significantly better. The range of nearly equal
intervals is reported.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megalowbit.cluster.failures import FailureTrace, NodeFailures
from megalowbit.cluster.intervals import daly_interval, expected_seconds
from megalowbit.cluster.run_history import CAUSES, HOPELESS, RunCosts, simulate_run
from megalowbit.errors import UserError

CONFIDENCE = 1.96  # standard errors on each side: 95 %
NEAR = 0.005  # differences of goodput below this do not matter
FARTHEST = 12  # search range around Daly's interval, in half octaves
ENOUGH_FAILURES = 50  # in all runs together, for a comparison
# computing cost of a run, and of drawing a node's first failure, relative to one event
RUN_IN_EVENTS, LIFE_IN_EVENTS = 5, 0.1


@dataclass(frozen=True, kw_only=True)
class IntervalOutcome:
    """Statistics of many simulated runs with one interval.

    Attributes:
        interval: seconds of training between saves.
        goodput: mean over the runs.
        low, high: bounds of the 95 % confidence interval of that mean.
        wall: mean duration of a run in seconds.
        shares: fraction of the time by cause, mean over the runs.
        failures, jobs: means over the runs.
        given_up: fraction of runs that did not end within `HOPELESS` times their training time.
        each: goodput of each run.
    """

    interval: float
    goodput: float
    low: float
    high: float
    wall: float
    shares: Mapping[str, float]
    failures: float
    jobs: float
    given_up: float
    each: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Best:
    """The result of a search.

    Attributes:
        outcome: statistics of the best interval.
        is_dalys: whether it is Daly's interval, because no other one is significantly better.
        shortest, longest: the range of tried intervals whose goodput is at most `NEAR` lower.
    """

    outcome: IntervalOutcome
    is_dalys: bool
    shortest: float
    longest: float


def failure_traces(failures: NodeFailures, *, runs: int, seed: int) -> list[FailureTrace]:
    """The failures of each of `runs` runs; deterministic in the arguments.

    Raises:
        UserError: there are too few runs for a meaningful mean.
    """
    if runs < 10:
        raise UserError(f"runs = {runs} is not valid: simulate at least 10, or 100 to resolve half a percent")
    return [FailureTrace(failures, seed, run) for run in range(runs)]


def expected_events(costs: RunCosts, failures: NodeFailures, *, runs: int) -> dict[str, float]:
    """An upper estimate of the events to simulate in `runs` runs with one interval, by kind.

    Saves do not count, because cycles without a failure are simulated in one step. A failure during a job, a
    pause or a wait for nodes counts once, including its repair. No run lasts longer than `HOPELESS` times its
    training time.
    """
    interval, job = min(daly_interval(costs.save, failures.mtbf), costs.work), math.inf
    pause = costs.detection + costs.requeue
    stretch = expected_seconds(
        1.0, interval, save=costs.save, mtbf=failures.mtbf, start=costs.start, pause=pause
    )
    if costs.time_limit < math.inf:
        trained = costs.time_limit - costs.notice - costs.start
        job = costs.start + trained + costs.save + costs.requeue
        stretch *= job / trained
    if costs.spares is not None and 2 * costs.repair / failures.mtbf > costs.spares:
        stretch = HOPELESS  # the run may spend most of its time waiting for nodes
    wall = min(stretch, HOPELESS) * costs.work + costs.start + pause
    return {
        "failures": runs * wall / failures.mtbf,
        "jobs": runs * wall / job,
        "lives of nodes": 0.0 if failures.shape == 1 else LIFE_IN_EVENTS * runs * failures.nodes,
        "runs": float(RUN_IN_EVENTS * runs),
    }


def simulate(costs: RunCosts, interval: float, traces: Sequence[FailureTrace]) -> IntervalOutcome:
    """Simulate one run for each trace, all with the same interval."""
    runs = [simulate_run(costs, interval, trace) for trace in traces]
    goodputs = [run.goodput for run in runs]
    mean = statistics.fmean(goodputs)
    margin = CONFIDENCE * statistics.stdev(goodputs) / math.sqrt(len(goodputs))
    return IntervalOutcome(
        interval=interval,
        goodput=mean,
        low=mean - margin,
        high=mean + margin,
        wall=statistics.fmean(run.wall for run in runs),
        shares={cause: statistics.fmean(run.spent[cause] / run.wall for run in runs) for cause in CAUSES},
        failures=statistics.fmean(run.failures for run in runs),
        jobs=statistics.fmean(run.jobs for run in runs),
        given_up=statistics.fmean(run.trained < costs.work for run in runs),
        each=tuple(goodputs),
    )


def best_interval(
    costs: RunCosts,
    failures: NodeFailures,
    traces: Sequence[FailureTrace],
    *,
    rounded: Callable[[float], float] = float,
) -> Best:
    """Find the interval with the highest mean goodput, searching outwards from Daly's interval.

    The search in a direction ends when goodput falls clearly below the best.

    Args:
        costs: durations of the parts of a run.
        failures: determine Daly's interval.
        traces: the failures of each run, the same for every candidate.
        rounded: rounds seconds to a possible, positive interval, such as whole steps.
    """
    tried: dict[float, IntervalOutcome] = {}
    formula = centre = min(daly_interval(costs.save, failures.mtbf), costs.work)

    def best() -> IntervalOutcome:
        return max(tried.values(), key=lambda outcome: outcome.goodput)

    def falls_behind(exponent: float, centre: float) -> bool:
        interval = rounded(centre * 2**exponent)
        if interval not in tried:
            tried[interval] = simulate(costs, interval, traces)
        return tried[interval].goodput < best().goodput - 2 * NEAR

    for direction in (1, -1):
        for half_octaves in range(FARTHEST):
            if falls_behind(direction * half_octaves / 2, centre):
                break
    for finer in (1 / 4, 1 / 8):
        centre = best().interval
        for exponent in (finer, -finer):
            falls_behind(exponent, centre)
    near = [each.interval for each in tried.values() if each.goodput >= best().goodput - NEAR]
    of_formula = tried[rounded(formula)]
    is_dalys = not is_better(best(), of_formula)
    outcome = of_formula if is_dalys else best()
    return Best(outcome=outcome, is_dalys=is_dalys, shortest=min(near), longest=max(near))


def is_better(one: IntervalOutcome, other: IntervalOutcome) -> bool:
    """Whether one interval is significantly better than another: a paired comparison of runs.

    False if there were too few failures to compare.
    """
    if one.failures * len(one.each) < ENOUGH_FAILURES:
        return False
    differences = [a - b for a, b in zip(one.each, other.each, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) > CONFIDENCE * error
