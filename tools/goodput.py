"""What failures cost a run, and how often to save.

    python tools/goodput.py --nodes 64 --node-mtbf-hours 6000 --save-seconds 40
    python tools/goodput.py --nodes 64 --node-mtbf-hours 6000 --checkpoint-gib 980 --bandwidth-gib 25
    python tools/goodput.py --nodes 64 --node-mtbf-hours 6000 --save-seconds 40 --step-seconds 4.2

Simulates runs whose nodes fail, and prints training time over wall time, what the rest went into and the
interval between saves that costs least, beside those of Young's and Daly's formulas. With --step-seconds
intervals are whole steps, as megalowbit.checkpoint.every takes them. See docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import NamedTuple

from megalowbit.cluster.failures import NodeFailures
from megalowbit.cluster.goodput import expected_events, failure_traces
from megalowbit.cluster.goodput_report import GoodputRequest, duration, make_report, table
from megalowbit.cluster.run_history import RunCosts
from megalowbit.errors import EXIT_USER_ERROR, UserError, printed, shown
from megalowbit.pretrain.command_line import OneLineParser, escape_unprintable_output

MOST_EVENTS = 400_000  # to simulate for an interval: about a second, and some thirty intervals are tried
LONGEST_TRAINING = 3650 * 86400.0  # seconds
SHORTEST_SAVE, LONGEST_SAVE = 0.001, 86400  # seconds


class Argument(NamedTuple):
    """A number that can be given; values outside of `least` to `most` are mistakes."""

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
        """Of the parsed option."""
        return self.flag.removeprefix("--").replace("-", "_")


ARGUMENTS = (
    Argument("--nodes", int, 1, 10**6, "N", "nodes that the run uses", is_required=True),
    Argument(
        "--node-mtbf-hours", float, 0.01, 10**7, "H", "mean time between failures of a node", is_required=True
    ),
    Argument("--shape", float, 0.1, 10, "K", "of a Weibull distribution; 1 is the exponential one", 1.0),
    Argument(
        "--save-seconds", float, SHORTEST_SAVE, LONGEST_SAVE, "S", "that a checkpoint stops training for"
    ),
    Argument("--checkpoint-gib", float, 0.001, 10**7, "G", "or its size in GiB,"),
    Argument("--bandwidth-gib", float, 0.001, 10**6, "B", "and GiB/s of all ranks together while they save"),
    Argument(
        "--start-seconds", float, 0, 86400, "S", "from a job's start to its first step, load included", 120.0
    ),
    Argument(
        "--detection-seconds",
        float,
        0,
        7 * 86400,
        "S",
        "from a failure to the job's end, as watchdog.timeout",
        600.0,
    ),
    Argument("--queue-seconds", float, 0, 30 * 86400, "S", "from a job's end to the next one's start", 60.0),
    Argument("--time-limit-hours", float, 0.01, 87600, "H", "of a job; without it there is none"),
    Argument(
        "--notice-seconds", float, 0, 86400, "S", "before the limit, when the job is told to save", 300.0
    ),
    Argument("--spares", int, 0, 10**6, "N", "nodes that stand by; without it there is always another"),
    Argument("--repair-hours", float, 0, 87600, "H", "until a failed node stands by again", 24.0),
    Argument("--days", float, 0.01, 3650, "D", "of training without failures; without it 30"),
    Argument("--steps", int, 1, 10**9, "N", "or optimizer steps, with --step-seconds"),
    Argument(
        "--step-seconds", float, 0.001, 86400, "S", "of an optimizer step: intervals become whole steps"
    ),
    Argument("--every", int, 1, 10**9, "N", "an interval of yours to compare, in steps of --step-seconds,"),
    Argument("--interval-minutes", float, 0.001, 10**6, "M", "or in minutes"),
    Argument("--runs", int, 10, 10**4, "N", "to simulate with each interval", 100),
    Argument("--seed", int, 0, 2**32 - 1, "N", "of the failures", 0),
)


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__)
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
    parser.add_argument("--json", action="store_true", help="print plain data, times in seconds")
    return parser


def check_values(options: argparse.Namespace) -> None:
    """Each number by itself.

    Raises:
        UserError: it is none, or of no run that anybody has.
    """
    for argument in ARGUMENTS:
        value = getattr(options, argument.name)
        if value is not None and not argument.least <= value <= argument.most:
            text = f"{value:g}" if isinstance(value, float) else shown(value)
            raise UserError(
                f"{argument.flag} {text} is not valid: give {argument.least:,} to {argument.most:,}"
            )


def request_of(options: argparse.Namespace) -> GoodputRequest:
    """What the arguments ask.

    Raises:
        UserError: they do not go together, or a value is not possible.
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
            f"and at most {duration(LONGEST_TRAINING)} are simulated: fewer --steps tell as much"
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
    """How long training stands still for a checkpoint, as measured or from its size."""
    size, bandwidth = options.checkpoint_gib, options.bandwidth_gib
    if (options.save_seconds is None) == (size is None) or (size is None) != (bandwidth is None):
        raise UserError("give --save-seconds, or both --checkpoint-gib and --bandwidth-gib")
    seconds = float(options.save_seconds if size is None else size / bandwidth)
    if not SHORTEST_SAVE <= seconds <= LONGEST_SAVE:
        raise UserError(
            f"--checkpoint-gib {size:g} at --bandwidth-gib {bandwidth:g} is a save of {seconds:g} s: "
            f"change one of them, {SHORTEST_SAVE} to {LONGEST_SAVE:,} s are simulated"
        )
    return seconds


def check_amount(options: argparse.Namespace, request: GoodputRequest) -> None:
    """Whether the simulation ends while somebody waits for it.

    Raises:
        UserError: it does not.
    """
    events = expected_events(request.costs, request.failures, runs=options.runs)
    total = sum(events.values())
    if total <= MOST_EVENTS:
        return
    most = max(events, key=lambda kind: events[kind])
    remedy = {
        "failures": f"fewer {'--days' if options.steps is None else '--steps'} or --runs tell as much",
        "jobs": f"raise --time-limit-hours {options.time_limit_hours}, or give fewer --runs",
        "lives of nodes": f"give fewer --runs, or leave --shape {options.shape:g} out",
        "runs": "give fewer",
    }[most]
    raise UserError(
        f"--runs {options.runs} of {duration(request.costs.work)} each take too long to simulate, some "
        f"{total:,.0f} events with each interval where {MOST_EVENTS:,} can be, most of them {most}: {remedy}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    escape_unprintable_output()
    try:
        options = build_parser().parse_args(arguments)
        request = request_of(options)
        check_amount(options, request)
        traces = failure_traces(request.failures, runs=options.runs, seed=options.seed)
        found = make_report(request, traces)
        print(json.dumps(found.to_dict(), indent=1) if options.json else table(found))
    except UserError as error:
        print(f"error: {printed(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
