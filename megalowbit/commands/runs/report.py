"""Write a page about a run, or one that compares several.

    megalowbit report runs/gpt2_tiny_fp4
    megalowbit report runs/bf16 runs/nvfp4 runs/nvfp4-seed-2 --out compared.html

The page is one HTML file that needs no network: losses, gaps to the first run with their noise, loss scale
and skipped steps, speed, memory, saturation and SNR by layer, precisions, what differs, environment,
configuration. A run may still be training. docs/report.md explains the page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalowbit.errors import EXIT_USER_ERROR, UserError, printed
from megalowbit.one_line_parser import OneLineParser, escape_unprintable_output


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.for_script(__doc__, "megalowbit report")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run folder; the first one is the reference"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the folder of the only run)",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    escape_unprintable_output()
    try:
        options = build_parser().parse_args(arguments)
        print(_report(options.runs, options.out))
    except UserError as error:
        print(f"error: {printed(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _report(runs: list[Path], out: Path | None) -> Path:
    from megalowbit.report.written import write_report

    return write_report(runs, out)
