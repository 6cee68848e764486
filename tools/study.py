#!/usr/bin/env python
"""The command `megalowbit study` as a script: `python tools/study.py --help`."""

import sys

from megalowbit.commands.studies.study import build_parser, main

__all__ = ["build_parser", "main"]

if __name__ == "__main__":
    sys.exit(main())
