"""Standard streams of a command: closed ones, narrow encodings, readers that have enough.

Importable from anywhere.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

EXIT_UNREAD = 141  # as shells report a program that SIGPIPE has ended


def escape_unprintable_output() -> None:
    """Make stdout escape characters that its encoding lacks, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def open_closed_streams() -> None:
    """Let closed standard streams (`>&-`) read and write nothing, here and in child processes.

    Else the next file that is opened gets the number of the closed stream, and what a library prints. A file
    that has the number already keeps it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(null, null == number)
            stream = os.fdopen(null, mode, errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # the one that is there whatever sys.stdout is


def write_nothing(stream: TextIO) -> None:
    """Send what is left in the buffer of a standard stream, and all that follows, to nobody."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def run_until_unread(main: Callable[[], int]) -> int:
    """Run a command; its exit code, or `EXIT_UNREAD` if the reader of stdout (`head`) has enough of it.

    If what the command has printed cannot be written, as on a full disk, prints so and returns 1.
    """
    open_closed_streams()
    escape_unprintable_output()
    try:
        return _flushed(_code_of(main))
    except BrokenPipeError:
        if not _is_unread(sys.stdout.fileno()):
            raise
        write_nothing(sys.stdout)
        return EXIT_UNREAD


def _code_of(main: Callable[[], int]) -> int:
    try:
        return main()
    except SystemExit as ending:  # of --help
        if isinstance(ending.code, str):
            raise
        return ending.code or 0


def _flushed(code: int) -> int:
    """The exit code after what is in the buffer of stdout has been written, or could not be."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        write_nothing(sys.stdout)
        print(f"error: stdout cannot be written ({error.strerror})", file=sys.stderr)
        return code or 1
    return code


def _is_unread(descriptor: int) -> bool:
    """Whether this is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
