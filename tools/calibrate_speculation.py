r"""Which SNR threshold precision speculation should have: short runs at several, set against bf16.

    python tools/calibrate_speculation.py --ds-config configs/gpt2_tiny_speculative.json \
        --threshold 5 --threshold 10 --threshold 15 --threshold 20 --seed 1 --seed 2 --seed 3

Trains the configuration with launch/pretrain.py at each threshold and in bf16, each run a process of its own,
prints what each costs in loss and gains in low-precision products, and suggests the lowest threshold whose
gap is allowed. A calibration that was interrupted goes on where it was when it is started again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalowbit.errors import EXIT_USER_ERROR, UserError, printed
from megalowbit.pretrain.command_line import OneLineParser, escape_unprintable_output

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (1, 2, 3)


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__)
    parser.add_argument(
        "--ds-config",
        type=Path,
        required=True,
        metavar="X.json",
        help="configuration with a megalowbit.speculation section, whose recipe and ladder are calibrated",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        action="append",
        required=True,
        metavar="DB",
        help="least SNR of a product, for all precisions of the ladder; repeat the flag for several",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="of each run (default: as configured)")
    parser.add_argument(
        "--seed",
        type=int,
        action="append",
        metavar="S",
        help="of weights and data; repeat the flag for several, which errors need "
        f"(default: {', '.join(map(str, SEEDS))})",
    )
    parser.add_argument(
        "--last",
        type=int,
        metavar="N",
        help="steps at the end whose mean loss is compared (default: a fifth of them)",
    )
    parser.add_argument(
        "--max-gap",
        type=float,
        default=0.3,
        metavar="PERCENT",
        help="what the loss may be above bf16's (default: %(default)s)",
    )
    _add_execution(parser)
    return parser


def _add_execution(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the runs, table.txt, table.json and calibration.png (default: "
        "runs/NAME-calibration, by the configuration's name)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        metavar="J",
        help="runs at a time, one thread each (default: %(default)s)",
    )
    parser.add_argument("--no-picture", action="store_true", help="table only, without matplotlib")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    escape_unprintable_output()
    try:
        options = build_parser().parse_args(arguments)
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
            program=ROOT / "launch" / "pretrain.py",
        )
        calibrate(plan, has_picture=not options.no_picture)
    except UserError as error:
        print(f"error: {printed(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
