"""Repeats the lines that the package logs while it builds what a cache lacks.

The package only logs. Programs wrap the first use of a corpus in `reported_builds` and say where lines go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PACKAGE = "megalowbit.data"  # whose lines are repeated, of all its folders


class _Lines(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        self._say(("WARNING: " if is_warning else "data      ") + record.getMessage())


@contextmanager
def reported_builds(say: Callable[[str], None], *, is_first: bool = True) -> Iterator[None]:
    """Pass what the package logs meanwhile to `say`: the first use of a corpus may take minutes.

    With `is_first=False`, only warnings: another process of this node says the rest.
    """
    package, handler = logging.getLogger(PACKAGE), _Lines(say)
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO if is_first else logging.WARNING)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
