r"""Find an SNR threshold for precision speculation: compare short runs at several thresholds with bf16.

    megalowbit calibrate --ds-config configs/gpt2_tiny_speculative.json \
        --threshold 10 --threshold 15 --threshold 20 --threshold 25 --seed 1 --seed 2 --seed 3

Trains the configuration at each threshold and in bf16, with a process for each run.
Prints the loss and the share of low-precision products at each threshold, and suggests the lowest threshold
with an allowed gap. To continue an interrupted calibration, run the same command again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.shipped_files import find_config, pretrain_script

SEEDS = (1, 2, 3)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser.for_script(__doc__, "megalowbit calibrate")
    parser.add_argument(
        "--ds-config",
        type=Path,
        required=True,
        metavar="X.json",
        help="configuration with a megalowbit.speculation section; its recipe and candidates are used",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        action="append",
        required=True,
        metavar="DB",
        help="lowest acceptable SNR of a product, for all candidates; repeat the flag for several thresholds",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each run (default: as configured)")
    parser.add_argument(
        "--seed",
        type=int,
        action="append",
        metavar="S",
        help="seed of weights and data; repeat the flag for several, which error estimates need "
        f"(default: {', '.join(map(str, SEEDS))})",
    )
    parser.add_argument(
        "--last",
        type=int,
        metavar="N",
        help="number of steps at the end whose mean loss is compared (default: a fifth of the steps)",
    )
    parser.add_argument(
        "--max-gap",
        type=float,
        default=0.3,
        metavar="PERCENT",
        help="by how much the loss may exceed that of bf16 (default: %(default)s)",
    )
    _add_execution(parser)
    return parser


def _add_execution(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the runs, table.txt, table.json and calibration.png (default: "
        "runs/NAME-calibration, NAME being that of the configuration)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        metavar="J",
        help="number of simultaneous runs, one thread each (default: %(default)s)",
    )
    parser.add_argument("--no-picture", action="store_true", help="only the table; needs no matplotlib")


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    options.ds_config = find_config(options.ds_config)
    from megalowbit.pretrain.sweep.calibration import CalibrationPlan, calibrate

    plan = CalibrationPlan(
        config=options.ds_config.resolve(),
        thresholds=tuple(options.threshold),
        seeds=tuple(options.seed or SEEDS),
        steps=options.steps,
        last=options.last,
        out=(options.out or Path("runs") / f"{options.ds_config.stem}-calibration").resolve(),
        jobs=options.jobs,
        max_gap=options.max_gap,
        program=pretrain_script(),
    )
    calibrate(plan, has_picture=not options.no_picture)
    return 0
