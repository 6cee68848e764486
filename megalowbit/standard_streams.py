"""Standard streams of a command: closed ones, narrow encodings, readers that have enough.

Importable from anywhere.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable


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


def _is_unread(descriptor: int) -> bool:
    """Whether this is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
