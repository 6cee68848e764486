"""Estimate what failures cost a run, and how often to save.

    megalowbit goodput --nodes 64 --node-mtbf-hours 6000 --save-seconds 40
    megalowbit goodput --nodes 64 --node-mtbf-hours 6000 --checkpoint-gib 980 --bandwidth-gib 25
    megalowbit goodput --nodes 64 --node-mtbf-hours 6000 --save-seconds 40 --step-seconds 4.2

Simulates runs whose nodes fail. Prints training time over wall time, the causes of the lost time, and the
save interval that costs least, next to the intervals of Young's and Daly's formulas. With --step-seconds,
intervals are whole steps, the unit of megalowbit.checkpoint.every. See docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import NamedTuple

from megalowbit.cluster.failures import NodeFailures
from megalowbit.cluster.goodput import expected_events, failure_traces
from megalowbit.cluster.goodput_report import GoodputRequest, duration, make_report, table
from megalowbit.cluster.run_history import RunCosts
from megalowbit.errors import UserError, shown
from megalowbit.one_line_parser import OneLineParser, printing_user_errors

MOST_EVENTS = 400_000  # simulated for one interval: about a second; some thirty intervals are tried
LONGEST_TRAINING = 3650 * 86400.0  # seconds
SHORTEST_SAVE, LONGEST_SAVE = 0.001, 86400  # seconds


class Argument(NamedTuple):
    """A numeric option and its valid range, `least` to `most`."""

    flag: str
    kind: type[int] | type[float]
    least: float
    most: float
    unit: str
    help: str
    default: float | None = None
    is_required: bool = False

    @property
    def name(self) -> str:
        """Name of the parsed option."""
        return self.flag.removeprefix("--").replace("-", "_")


ARGUMENTS = (
    Argument("--nodes", int, 1, 10**6, "N", "number of nodes that the run uses", is_required=True),
    Argument(
        "--node-mtbf-hours", float, 0.01, 10**7, "H", "mean time between failures of a node", is_required=True
    ),
    Argument(
        "--shape", float, 0.1, 10, "K", "shape of the Weibull distribution of failures; 1: exponential", 1.0
    ),
    Argument(
        "--save-seconds", float, SHORTEST_SAVE, LONGEST_SAVE, "S", "time that training stops for a checkpoint"
    ),
    Argument("--checkpoint-gib", float, 0.001, 10**7, "G", "or: size of a checkpoint in GiB, with"),
    Argument("--bandwidth-gib", float, 0.001, 10**6, "B", "total write bandwidth of all ranks, in GiB/s"),
    Argument(
        "--start-seconds",
        float,
        0,
        86400,
        "S",
        "time from a job's start to its first step, loading included",
        120.0,
    ),
    Argument(
        "--detection-seconds",
        float,
        0,
        7 * 86400,
        "S",
        "time from a failure to the job's end: 20 to 30 s for a lost rank, up to 1.5 × watchdog.timeout for "
        "one that hangs",
        30.0,
    ),
    Argument(
        "--queue-seconds", float, 0, 30 * 86400, "S", "time from a job's end to the start of the next", 60.0
    ),
    Argument("--time-limit-hours", float, 0.01, 87600, "H", "time limit of a job (default: none)"),
    Argument(
        "--notice-seconds", float, 0, 86400, "S", "how long before the limit the job is asked to save", 300.0
    ),
    Argument("--spares", int, 0, 10**6, "N", "number of spare nodes (default: unlimited)"),
    Argument("--repair-hours", float, 0, 87600, "H", "time until a failed node is available again", 24.0),
    Argument("--days", float, 0.01, 3650, "D", "days of training without failures (default: 30)"),
    Argument("--steps", int, 1, 10**9, "N", "or: number of optimizer steps, with --step-seconds"),
    Argument(
        "--step-seconds", float, 0.001, 86400, "S", "time of an optimizer step; intervals become whole steps"
    ),
    Argument("--every", int, 1, 10**9, "N", "your interval, for comparison, in steps of --step-seconds;"),
    Argument("--interval-minutes", float, 0.001, 10**6, "M", "or in minutes"),
    Argument("--runs", int, 10, 10**4, "N", "number of runs to simulate for each interval", 100),
    Argument("--seed", int, 0, 2**32 - 1, "N", "seed of the failures", 0),
)


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit goodput")
    for argument in ARGUMENTS:
        default = "" if argument.default is None else f" (default: {argument.default:g})"
        parser.add_argument(
            argument.flag,
            type=argument.kind,
            default=argument.default,
            required=argument.is_required,
            metavar=argument.unit,
            help=argument.help + default,
        )
    parser.add_argument("--json", action="store_true", help="print JSON, with times in seconds")
    return parser


def check_values(options: argparse.Namespace) -> None:
    """Check the range of each number.

    Raises:
        UserError: a number is out of range.
    """
    for argument in ARGUMENTS:
        value = getattr(options, argument.name)
        if value is not None and not argument.least <= value <= argument.most:
            text = f"{value:g}" if isinstance(value, float) else shown(value)
            raise UserError(
                f"{argument.flag} {text} is not valid: give {argument.least:,} to {argument.most:,}"
            )


def request_of(options: argparse.Namespace) -> GoodputRequest:
    """Convert the arguments into a request.

    Raises:
        UserError: they cannot be combined, or a value is invalid.
    """
    check_values(options)
    step_seconds = options.step_seconds
    if step_seconds is None and (options.steps is not None or options.every is not None):
        raise UserError("--steps and --every count optimizer steps: add --step-seconds, how long one takes")
    if options.days is not None and options.steps is not None:
        raise UserError("--days and --steps both say how long the run is: give one of them")
    if options.every is not None and options.interval_minutes is not None:
        raise UserError("--every and --interval-minutes are the same thing: give one of them")
    work = (30.0 if options.days is None else options.days) * 86400
    own = None if options.interval_minutes is None else options.interval_minutes * 60
    if step_seconds is not None:
        work = (options.steps or max(1, round(work / step_seconds))) * step_seconds
        own = options.every * step_seconds if options.every is not None else own
    if options.steps is not None and work > LONGEST_TRAINING:
        raise UserError(
            f"--steps {options.steps} of --step-seconds {step_seconds:g} are {duration(work)} of training, "
            f"and at most {duration(LONGEST_TRAINING)} can be simulated: give fewer --steps"
        )
    limit = options.time_limit_hours
    return GoodputRequest(
        failures=NodeFailures(
            nodes=options.nodes, node_mtbf=options.node_mtbf_hours * 3600, shape=options.shape
        ),
        costs=RunCosts(
            work=work,
            save=save_seconds(options),
            start=options.start_seconds,
            detection=options.detection_seconds,
            requeue=options.queue_seconds,
            time_limit=math.inf if limit is None else limit * 3600,
            notice=options.notice_seconds,
            spares=options.spares,
            repair=options.repair_hours * 3600,
        ),
        step_seconds=step_seconds,
        own=own,
    )


def save_seconds(options: argparse.Namespace) -> float:
    """How long training stops for a checkpoint: as given, or computed from its size."""
    size, bandwidth = options.checkpoint_gib, options.bandwidth_gib
    if (options.save_seconds is None) == (size is None) or (size is None) != (bandwidth is None):
        raise UserError("give --save-seconds, or both --checkpoint-gib and --bandwidth-gib")
    seconds = float(options.save_seconds if size is None else size / bandwidth)
    if not SHORTEST_SAVE <= seconds <= LONGEST_SAVE:
        raise UserError(
            f"--checkpoint-gib {size:g} at --bandwidth-gib {bandwidth:g} is a save of {seconds:g} s: "
            f"change one of them; {SHORTEST_SAVE} to {LONGEST_SAVE:,} s can be simulated"
        )
    return seconds


def check_amount(options: argparse.Namespace, request: GoodputRequest) -> None:
    """Check that the simulation takes an acceptable time.

    Raises:
        UserError: it would take too long.
    """
    events = expected_events(request.costs, request.failures, runs=options.runs)
    total = sum(events.values())
    if total <= MOST_EVENTS:
        return
    most = max(events, key=lambda kind: events[kind])
    remedy = {
        "failures": f"give fewer {'--days' if options.steps is None else '--steps'} or --runs",
        "jobs": f"raise --time-limit-hours {options.time_limit_hours}, or give fewer --runs",
        "lives of nodes": f"give fewer --runs, or leave --shape {options.shape:g} out",
        "runs": "give fewer",
    }[most]
    raise UserError(
        f"--runs {options.runs} of {duration(request.costs.work)} each take too long to simulate, some "
        f"{total:,.0f} events an interval (at most {MOST_EVENTS:,}), most of them {most}: {remedy}"
    )


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    request = request_of(options)
    check_amount(options, request)
    traces = failure_traces(request.failures, runs=options.runs, seed=options.seed)
    found = make_report(request, traces)
    print(json.dumps(found.to_dict(), indent=1) if options.json else table(found))
    return 0
