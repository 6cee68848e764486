#!/usr/bin/env python
"""The command `megalowbit calibrate` as a script: `python tools/calibrate_speculation.py --help`."""

import sys

from megalowbit.commands.studies.calibrate import build_parser, main
from megalowbit.standard_streams import run_until_unread

__all__ = ["build_parser", "main"]

if __name__ == "__main__":
    sys.exit(run_until_unread(main))
