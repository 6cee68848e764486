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

from megalowbit.cluster.failures import NodeFailures
from megalowbit.cluster.goodput import failure_traces
from megalowbit.cluster.goodput_report import Question, answer, duration, table
from megalowbit.cluster.run_history import RunCosts
from megalowbit.errors import EXIT_USER_ERROR, UserError
from megalowbit.pretrain.command_line import OneLineParser

MOST_FAILURES = 1e6  # to simulate for an interval: seconds


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    description, _, rest = str(__doc__).partition("\n\n")
    parser = OneLineParser(
        description=description,
        epilog=f"examples:\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=int, required=True, metavar="N", help="nodes that the run uses")
    add(
        "--node-mtbf-hours",
        type=float,
        required=True,
        metavar="H",
        help="mean time between failures of a node",
    )
    add(
        "--shape",
        type=float,
        default=1.0,
        metavar="K",
        help="of a Weibull distribution (default: 1, exponential)",
    )
    add("--save-seconds", type=float, metavar="S", help="that a checkpoint stops training for")
    add("--checkpoint-gib", type=float, metavar="G", help="or its size in GiB,")
    add("--bandwidth-gib", type=float, metavar="B", help="and GiB/s of all ranks together while they save")
    add(
        "--start-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="from a job's start to its first step, load included (default: 120)",
    )
    add(
        "--detection-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="from a failure to the job's end (default: 600, as watchdog.timeout)",
    )
    add(
        "--queue-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="from a job's end to the next one's start (default: 60)",
    )
    add("--time-limit-hours", type=float, default=math.inf, metavar="H", help="of a job (default: none)")
    add(
        "--notice-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="before the limit, when the job is told to save (default: 300)",
    )
    add("--spares", type=int, metavar="N", help="nodes that stand by (default: there is always another)")
    add(
        "--repair-hours",
        type=float,
        default=24.0,
        metavar="H",
        help="until a failed node stands by again (default: 24)",
    )
    add("--days", type=float, metavar="D", help="of training without failures (default: 30)")
    add("--steps", type=int, metavar="N", help="or optimizer steps, with --step-seconds")
    add("--step-seconds", type=float, metavar="S", help="of an optimizer step: intervals become whole steps")
    add("--every", type=int, metavar="N", help="an interval of yours to compare, in steps,")
    add("--interval-minutes", type=float, metavar="M", help="or in minutes")
    add("--runs", type=int, default=100, metavar="N", help="to simulate with each interval (default: 100)")
    add("--seed", type=int, default=0, metavar="N", help="of the failures (default: 0)")
    add("--json", action="store_true", help="print plain data, times in seconds")
    return parser


def question_of(options: argparse.Namespace) -> Question:
    """What the arguments ask.

    Raises:
        UserError: they do not go together, or a value is not possible.
    """
    step_seconds = options.step_seconds
    for flag in (
        "step_seconds",
        "checkpoint_gib",
        "bandwidth_gib",
        "every",
        "interval_minutes",
        "days",
        "steps",
    ):
        value = getattr(options, flag)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{flag.replace('_', '-')} {value:g} is not valid: it must be positive")
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
    return Question(
        failures=NodeFailures(
            nodes=options.nodes, node_mtbf=options.node_mtbf_hours * 3600, shape=options.shape
        ),
        costs=RunCosts(
            work=work,
            save=save_seconds(options),
            start=options.start_seconds,
            detection=options.detection_seconds,
            requeue=options.queue_seconds,
            time_limit=options.time_limit_hours * 3600,
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
    return float(options.save_seconds if size is None else size / bandwidth)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = build_parser().parse_args(arguments)
        question = question_of(options)
        count = options.runs * question.costs.work / question.failures.mtbf
        if count > MOST_FAILURES:
            raise UserError(
                f"{options.runs} runs of {duration(question.costs.work)} with a failure in every "
                f"{duration(question.failures.mtbf)} take too long to simulate: fewer --days tell as much"
            )
        traces = failure_traces(question.failures, runs=options.runs, seed=options.seed)
        found = answer(question, traces)
        print(json.dumps(found.to_dict(), indent=1) if options.json else table(found))
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
