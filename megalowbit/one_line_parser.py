"""The parser of every command line: a mistake is a `UserError` of one line, and a docstring is the help.

Importable from anywhere, and light: commands build their parsers before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec

from megalowbit.errors import EXIT_TRANSIENT, EXIT_USER_ERROR, TransientError, UserError, printed

Arguments = ParamSpec("Arguments")
REMEDIES = {
    errno.ENOSPC: "free space, and run the same command again",
    errno.EDQUOT: "free space of your quota, and run the same command again",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), and run the same command again",
}


def printing_user_errors(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """`main` that prints a `UserError`, or that a disk is full, on one line, and returns the exit code."""

    @functools.wraps(main)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {printed(error)}", file=sys.stderr)
            return EXIT_TRANSIENT if isinstance(error, TransientError) else EXIT_USER_ERROR
        except OSError as error:
            if error.errno not in REMEDIES:
                raise
            where = f"{error.filename}: " if error.filename else ""
            print(f"error: {where}{os.strerror(error.errno)}: {REMEDIES[error.errno]}", file=sys.stderr)
            return EXIT_USER_ERROR

    return run


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that raises `UserError` for invalid arguments."""

    @classmethod
    def for_script(cls, text: str | None, prog: str | None = None) -> OneLineParser:
        """A parser whose description is the first paragraph of a docstring; the rest are examples.

        `prog` is how the program is started; None: as the file of this process is named.
        """
        description, _, examples = str(text).partition("\n\n")
        return cls(
            prog=prog,
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` instead of printing the usage."""
        raise UserError(f"{message}; see --help")
