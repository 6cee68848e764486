"""Report the precisions that speculation chose in a run, by layer and product.

    python tools/speculation_report.py runs/gpt2_tiny_speculative
    python tools/speculation_report.py runs/gpt2_tiny_speculative --picture speculation.png

Prints the fraction of steps at each precision, how many verified products met their threshold, and the
prediction with the largest error. The picture needs matplotlib: pip install 'megalowbit[plots]'. The run may
still be in progress.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalowbit.errors import EXIT_USER_ERROR, UserError, printed
from megalowbit.pretrain.command_line import OneLineParser, print_what_can_be_printed


def build_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = OneLineParser.of_program(__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run folder")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="also draw a picture; an existing file is replaced"
    )
    return parser


def check_picture(path: Path) -> None:
    """Check the path before the run is read."""
    if path.suffix.lower() != ".png":
        raise UserError(f"--picture {path} is not a PNG: name a file that ends in .png")
    if not path.parent.is_dir():
        raise UserError(
            f"--picture {path}: there is no folder {path.parent}: create it, or name another file"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    print_what_can_be_printed()
    try:
        options = build_parser().parse_args(arguments)
        if options.picture is not None:
            check_picture(options.picture)
        from megalowbit.speculation.reports.history import read_history, table

        history = read_history(options.run_dir)
        print(table(history))
        if options.picture is not None:
            from megalowbit.speculation.reports.picture import draw_history

            draw_history(history, options.picture)
            print(f"picture: {options.picture}")
    except UserError as error:
        print(f"error: {printed(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
