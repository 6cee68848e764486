#!/usr/bin/env python
"""The command `megalowbit convert` as a script: `python tools/convert_hf.py --help`."""

import sys

from megalowbit.commands.models.convert import build_parser, main
from megalowbit.standard_streams import run_until_unread

__all__ = ["build_parser", "main"]

if __name__ == "__main__":
    sys.exit(run_until_unread(main))
