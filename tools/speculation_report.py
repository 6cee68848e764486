"""Report on precision speculation in a run, by layer and product.

    python tools/speculation_report.py runs/gpt2_tiny_speculative
    python tools/speculation_report.py runs/gpt2_tiny_speculative --picture speculation.png

Prints the share of steps at each precision, how many verifications were hits, and the worst prediction. The
picture needs matplotlib: pip install 'megalowbit[plots]'. The run may still be in progress.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalowbit.errors import UserError
from megalowbit.one_line_parser import OneLineParser, printing_user_errors
from megalowbit.standard_streams import run_until_unread


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser.for_script(__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="also draw a picture; an existing file is replaced"
    )
    return parser


def check_picture(path: Path) -> None:
    """Validate the name of the picture before the run is read."""
    if path.suffix.lower() != ".png":
        raise UserError(f"--picture {path} is not a PNG: give a name that ends in .png")
    if not path.parent.is_dir():
        raise UserError(
            f"--picture {path}: folder {path.parent} does not exist: create it, or choose another file"
        )


@printing_user_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
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
    return 0


if __name__ == "__main__":
    sys.exit(run_until_unread(main))
