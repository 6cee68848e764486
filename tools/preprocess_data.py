#!/usr/bin/env python
"""The command `megalowbit preprocess` as a script: `python tools/preprocess_data.py --help`."""

import sys

from megalowbit.commands.runs.preprocess import build_parser, main
from megalowbit.standard_streams import run_until_unread

__all__ = ["build_parser", "main"]

if __name__ == "__main__":
    sys.exit(run_until_unread(main))
