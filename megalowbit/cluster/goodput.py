"""What failures cost a run: training time over wall time, and the interval between saves that costs least.

Many runs are simulated (`run_history`), each struck at moments of its own. Candidates for the interval are
compared on the same failures, so that their differences are theirs and not the draw's. The curve is flat
about its top: Daly's interval is kept unless another is better beyond chance, and what lies near is told.
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
NEAR = 0.005  # of goodput: not worth telling apart
FARTHEST = 12  # half octaves from Daly's interval
ENOUGH_FAILURES = 50  # in all runs together
RUN_IN_EVENTS, LIFE_IN_EVENTS = 5, 0.1  # what a run, and the draw of a node's first failure, cost beside one


@dataclass(frozen=True, kw_only=True)
class IntervalOutcome:
    """Many simulated runs with one interval.

    Attributes:
        interval: seconds of training between saves.
        goodput: mean over the runs.
        low, high: of the 95 % confidence interval of that mean.
        wall: mean seconds of a run.
        shares: of the time, by cause: means over the runs.
        failures, jobs: means over the runs.
        given_up: share of runs that would not have ended in `HOPELESS` times their training time.
        each: goodput of every run.
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
    """What a search found.

    Attributes:
        outcome: of the best interval.
        is_dalys: it is the formula's, which no other interval beat beyond chance.
        shortest, longest: of the intervals that were tried and cost at most `NEAR` of goodput more.
    """

    outcome: IntervalOutcome
    is_dalys: bool
    shortest: float
    longest: float


def failure_traces(failures: NodeFailures, *, runs: int, seed: int) -> list[FailureTrace]:
    """What strikes `runs` runs; the same arguments, the same moments.

    Raises:
        UserError: a mean over so few runs says nothing.
    """
    if runs < 10:
        raise UserError(f"runs = {runs} is not valid: simulate at least 10, 100 for half a percent")
    return [FailureTrace(failures, seed, run) for run in range(runs)]


def expected_events(costs: RunCosts, failures: NodeFailures, *, runs: int) -> dict[str, float]:
    """How much there is to follow in `runs` runs with one interval, by what brings it; rather too much.

    Saves are none of it, for cycles that nothing comes between are taken at once. A failure strikes a job, a
    pause or a wait for nodes, and is a repair as well. No run goes on for longer than `HOPELESS` times its
    training.
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
        stretch = HOPELESS  # it may wait for nodes for most of its time
    wall = min(stretch, HOPELESS) * costs.work + costs.start + pause
    return {
        "failures": runs * wall / failures.mtbf,
        "jobs": runs * wall / job,
        "lives of nodes": 0.0 if failures.shape == 1 else LIFE_IN_EVENTS * runs * failures.nodes,
        "runs": float(RUN_IN_EVENTS * runs),
    }


def simulate(costs: RunCosts, interval: float, traces: Sequence[FailureTrace]) -> IntervalOutcome:
    """Runs with one interval, one for each trace."""
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
    """The interval of highest mean goodput, searched from Daly's outwards as far as it is worth it.

    Args:
        costs: of the run.
        failures: where the search begins.
        traces: what strikes each run, for every candidate alike.
        rounded: turns seconds into an interval that can be had, as whole steps; positive.
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
    """Whether one interval beats another beyond chance, run by run under the same failures.

    Where few of the runs were struck at all, nothing is known of what failures cost, and none does.
    """
    if one.failures * len(one.each) < ENOUGH_FAILURES:
        return False
    differences = [a - b for a, b in zip(one.each, other.each, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) > CONFIDENCE * error
