#!/usr/bin/env python
"""The command `megalowbit plan-layers` as a script: `python tools/plan_layers.py --help`."""

import sys

from megalowbit.commands.studies.plan_layers import build_parser, main
from megalowbit.standard_streams import run_until_unread

__all__ = ["build_parser", "main"]

if __name__ == "__main__":
    sys.exit(run_until_unread(main))
