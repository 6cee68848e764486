"""The parser of every command line: a mistake is a `UserError` of one line, and a docstring is the help.

Importable from anywhere, and light: commands build their parsers before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import select
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec

from megalowbit.errors import EXIT_TRANSIENT, EXIT_USER_ERROR, TransientError, UserError, printed

Arguments = ParamSpec("Arguments")


def escape_unprintable_output() -> None:
    """Make stdout escape characters that its encoding lacks, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


EXIT_UNREAD = 141  # as shells report a program that SIGPIPE has ended


def open_closed_streams() -> None:
    """Let standard streams that the caller closed (`>&-`) read and write nothing.

    Else the next file that is opened gets the number of the closed stream, and what a library prints.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(sys, name, os.fdopen(descriptor, mode, errors="backslashreplace", closefd=False))


def run_until_unread(main: Callable[[], int]) -> int:
    """Run a command; its exit code, or `EXIT_UNREAD` if the reader of stdout (`head`) has enough of it."""
    open_closed_streams()
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        return EXIT_UNREAD
    return code


def printing_user_errors(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """`main` of a command line that prints a `UserError` on one line and returns the exit code for it."""

    @functools.wraps(main)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {printed(error)}", file=sys.stderr)
            return EXIT_TRANSIENT if isinstance(error, TransientError) else EXIT_USER_ERROR

    return run


def _is_unread(descriptor: int) -> bool:
    """Whether this is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


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
