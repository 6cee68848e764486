"""Input and output of the goodput simulation, as a table and as plain data.

The report compares the interval found by simulation with those of Young's and Daly's formulas and, if given,
the user's interval. All are simulated with the same failures. If Daly's model applies, the report also shows
the goodput that it predicts for each interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megalowbit.cluster.failures import FailureTrace, NodeFailures
from megalowbit.cluster.goodput import Best, IntervalOutcome, best_interval, simulate
from megalowbit.cluster.intervals import (
    daly_first_order_interval,
    daly_interval,
    expected_seconds,
    young_interval,
)
from megalowbit.cluster.run_history import CAUSES, RunCosts

BEST, OWN = "best, simulated", "yours"
DALYS_MODEL = "Daly's model"  # heading of the column with its prediction
UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


@dataclass(frozen=True, kw_only=True)
class GoodputRequest:
    """The input of the simulation.

    Attributes:
        failures: how often nodes fail.
        costs: durations of the parts of a run.
        step_seconds: duration of an optimizer step; None: intervals need not be whole steps.
        own: the user's interval to compare with, in seconds; None: none.
    """

    failures: NodeFailures
    costs: RunCosts
    step_seconds: float | None = None
    own: float | None = None

    def rounded(self, interval: float) -> float:
        """The interval rounded to whole steps, at least one."""
        if self.step_seconds is None:
            return interval
        return max(1, round(interval / self.step_seconds)) * self.step_seconds

    def steps(self, interval: float) -> int | None:
        """The number of steps in an interval; None if the duration of a step is unknown."""
        return None if self.step_seconds is None else max(1, round(interval / self.step_seconds))

    @property
    def is_dalys_model(self) -> bool:
        """Whether Daly's model applies: exponential failures, no time limit, unlimited spare nodes."""
        return self.failures.shape == 1 and self.costs.time_limit == math.inf and self.costs.spares is None

    def expected_goodput(self, interval: float) -> float | None:
        """The goodput that Daly's model predicts; None if it does not apply."""
        if not self.is_dalys_model:
            return None
        costs = self.costs
        return costs.work / expected_seconds(
            costs.work,
            interval,
            save=costs.save,
            mtbf=self.failures.mtbf,
            start=costs.start,
            pause=costs.detection + costs.requeue,
        )


@dataclass(frozen=True, kw_only=True)
class GoodputReport:
    """The output of the simulation.

    Attributes:
        request: the input.
        best: the interval found by simulation.
        outcomes: by name of the interval, the best one first.
    """

    request: GoodputRequest
    best: Best
    outcomes: dict[str, IntervalOutcome]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: seconds and fractions; infinity becomes None."""
        request = self.request
        rows = {
            name: {
                **{key: value for key, value in asdict(outcome).items() if key != "each"},
                "steps": request.steps(outcome.interval),
                "expected_goodput": request.expected_goodput(outcome.interval),
            }
            for name, outcome in self.outcomes.items()
        }
        asked = {**asdict(request.failures), **asdict(request.costs), "step_seconds": request.step_seconds}
        return {
            "asked": {key: None if value == math.inf else value for key, value in asked.items()},
            "mtbf": request.failures.mtbf,
            "best": rows[BEST],
            "is_dalys": self.best.is_dalys,
            "near": {"shortest": self.best.shortest, "longest": self.best.longest},
            "intervals": rows,
        }


def make_report(request: GoodputRequest, traces: Sequence[FailureTrace]) -> GoodputReport:
    """Search for the best interval and compare it with those of the formulas."""
    costs, failures = request.costs, request.failures
    best = best_interval(costs, failures, traces, rounded=request.rounded)
    restart = costs.detection + costs.requeue + costs.start
    intervals = {
        "Young 1974": young_interval(costs.save, failures.mtbf),
        "Daly 2006, first order": daly_first_order_interval(costs.save, failures.mtbf, restart),
        "Daly 2006": daly_interval(costs.save, failures.mtbf),
    }
    if request.own is not None:
        intervals[OWN] = request.own
    outcomes = {BEST: best.outcome}
    for name, interval in intervals.items():
        outcomes[name] = simulate(costs, request.rounded(interval), traces)
    return GoodputReport(request=request, best=best, outcomes=outcomes)


def table(found: GoodputReport) -> str:
    """The report as text."""
    request, best = found.request, found.best.outcome
    failures, costs = request.failures, request.costs
    lines = [
        f"nodes      {failures.nodes:,}, each fails once in {duration(failures.node_mtbf)}: "
        f"one failure every {duration(failures.mtbf)}",
        f"costs      save {duration(costs.save)}, detection {duration(costs.detection)}, queue "
        f"{duration(costs.requeue)}, start {duration(costs.start)}",
        f"training   {duration(costs.work)}, takes {duration(best.wall)} in {best.jobs:,.1f} jobs with "
        f"{best.failures:,.1f} failures",
        "",
        f"{'interval between saves':34}{'steps' if request.step_seconds else '':>9}   {'goodput (95 %)':16}"
        f"{DALYS_MODEL if request.is_dalys_model else '':>12}".rstrip(),
    ]
    for name, outcome in found.outcomes.items():
        steps, expected = request.steps(outcome.interval), request.expected_goodput(outcome.interval)
        lines.append(
            f"{name:24}{duration(outcome.interval):>10}{'' if steps is None else f'{steps:,}':>9}   "
            f"{100 * outcome.goodput:5.2f} ± {100 * (outcome.high - outcome.goodput):4.2f} %  "
            f"{'' if expected is None else f'{100 * expected:10.2f} %'}".rstrip()
            + (f"  ({outcome.given_up:.0%} never end)" if outcome.given_up else "")
        )
    lost = ", ".join(f"{cause} {100 * best.shares[cause]:.2f} %" for cause in CAUSES if best.shares[cause])
    near = (duration(each) for each in (found.best.shortest, found.best.longest))
    lines += [
        "",
        f"time lost with the best interval: {lost}",
        "intervals within half a percent of it: {} to {}".format(*near),
    ]
    lines += ["no interval is significantly better than Daly's"] if found.best.is_dalys else []
    interval = best.interval
    if interval >= costs.time_limit:
        lines.append(
            "the save at the end of each job is enough; saving as often as this costs half a percent at most:"
        )
        interval = min(found.best.shortest, costs.time_limit)
    if request.step_seconds is not None:
        lines.append(f"megalowbit.checkpoint.every = {request.steps(interval)}")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Three digits and a suitable unit: `"18.6 min"`."""
    name, size = next(((name, size) for name, size in UNITS if seconds >= 2 * size), UNITS[-1])
    value = seconds / size
    return f"{value:,.0f} {name}" if value >= 100 else f"{value:.3g} {name}"
