#!/usr/bin/env python3
"""Check a machine with GPUs before the first run: bits, speed, memory, host reads, a run and its resume.

    python tools/first_gpu_hour.py --out first_hour
    python tools/first_gpu_hour.py --out first_hour --steps 3,layer --again

Writes report.jsonl and summary.md into the folder; docs/gpu.md says how to read them. Steps that are done in
the folder are kept. Without a GPU, checks that need one are skipped with the reason.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.first_hour.runner import NUMBERED, chosen_steps, run_steps
from megalowbit.errors import EXIT_USER_ERROR, UserError, printed
from megalowbit.one_line_parser import OneLineParser
from megalowbit.standard_streams import run_until_unread

EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser.for_script(__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("first_hour"), metavar="DIR", help="folder of the results"
    )
    parser.add_argument(
        "--steps",
        help=f"names or numbers, separated by commas (default: all): {NUMBERED}",
    )
    parser.add_argument("--again", action="store_true", help="run steps again that are done")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 if nothing failed, 1 if something did, 2 for a user error."""
    try:
        options = build_parser().parse_args(arguments)
        if options.out.exists() and not options.out.is_dir():
            raise UserError(f"--out {options.out} is not a folder: choose another name")
        return 0 if run_steps(options.out, chosen_steps(options.steps), again=options.again) else 1
    except UserError as error:
        print(printed(error), file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # of stdout
        raise
    except OSError as error:
        print(f"--out {options.out} cannot be used ({error}): name another folder", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("stopped: the same command continues with the step that was interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, it ends the step first
    sys.exit(run_until_unread(main))
