"""The last rows of a terminal for one writer; everything else scrolls above them.

The terminal itself keeps the two apart: its scrolling region (DECSTBM) ends above the reserved rows, and the
cursor stays in the region. Lines of any origin (`print`, C libraries, other processes) therefore appear
above, without a redirected file descriptor that a crash could leave unread. The rows are drawn at absolute
positions, with the cursor saved before and restored after, in one write.

A change of size is noticed at the next draw: the old rows are erased and the region is set again. Not
covered: a process that is suspended or killed (SIGKILL, a segmentation fault) leaves the region set; `reset`
ends it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, TextIO

SAVE, RESTORE = "\x1b7", "\x1b8"
WHOLE_SCREEN = "\x1b[r"  # no scrolling region; moves the cursor to the first row
ERASE_BELOW, ERASE_LINE, PLAIN = "\x1b[J", "\x1b[2K", "\x1b[0m"
ROWS_ABOVE = 3  # that stay for other lines


class Shape(NamedTuple):
    """Size of the terminal, and how many of its last rows are reserved."""

    columns: int
    rows: int
    height: int

    @property
    def top(self) -> int:
        """The first reserved row, from 1."""
        return self.rows - self.height + 1


class TerminalRows:
    """Reserves rows at the first draw and returns them at `close`.

    Args:
        file: standard output, a terminal.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._shape: Shape | None = None

    def size(self) -> tuple[int, int]:
        """Columns, and rows that may be reserved; both may be 0.

        Raises:
            OSError: the terminal is gone.
        """
        columns, rows = os.get_terminal_size(self._file.fileno())
        return max(columns - 1, 0), max(rows - ROWS_ABOVE, 0)  # in the last column, terminals wrap

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines that fit `size`; fewer than before leave the rest blank.

        Raises:
            OSError: the terminal is gone.
        """
        columns, rows = os.get_terminal_size(self._file.fileno())
        lines = lines[: max(rows - ROWS_ABOVE, 0)]  # it may have shrunk since `size`
        if not lines:
            self.close()
            return
        if self._shape is not None and self._shape[:2] != (columns, rows):
            shape = Shape(columns, rows, len(lines))
            text = self._resized(shape)
        else:
            before = 0 if self._shape is None else self._shape.height
            shape = Shape(columns, rows, max(before, len(lines)))
            text = self._grown(shape, shape.height - before)
        self._shape = shape
        padded = [*lines, *[""] * (shape.height - len(lines))]
        drawn = "".join(
            f"\x1b[{row};1H{ERASE_LINE}{line}{PLAIN}" for row, line in enumerate(padded, start=shape.top)
        )
        self._write(f"{text}{SAVE}{drawn}{RESTORE}")

    def close(self) -> None:
        """Erase the rows and let the terminal scroll as before; the cursor stays where it is."""
        if self._shape is not None:
            text, self._shape = self._closing(), None
            self._write(text)

    def release(self) -> None:
        """As `close`, from another thread of a process that ends; waits for no lock of the file."""
        if self._shape is not None:
            with suppress(OSError, ValueError):  # the terminal is gone
                os.write(self._file.fileno(), self._closing().encode())

    def _closing(self) -> str:
        assert self._shape is not None
        return f"{SAVE}{WHOLE_SCREEN}\x1b[{self._shape.top};1H{ERASE_BELOW}{RESTORE}"

    def _grown(self, shape: Shape, more: int) -> str:
        """Reserve `more` rows: scroll up what is above them."""
        if not more:
            return ""
        if self._shape is None:
            scroll = "\n" * more  # from the cursor, which need not be in the last row
        else:
            scroll = f"{SAVE}\x1b[{self._shape.top - 1};1H" + "\n" * more + RESTORE
        return f"{scroll}\x1b[{more}A{_region(shape)}"

    def _resized(self, shape: Shape) -> str:
        """Erase the old rows, wherever the terminal has moved them, and reserve the new ones."""
        assert self._shape is not None
        # a terminal that wraps lines again may have made two of each
        first = shape.top - self._shape.height * (shape.columns < self._shape.columns)
        first = max(min(first, self._shape.top), 1)
        erased = f"{WHOLE_SCREEN}\x1b[{first};1H{ERASE_BELOW}"
        return f"{erased}{_region(shape)}\x1b[{min(first, shape.top - 1)};1H"

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


def _region(shape: Shape) -> str:
    """Limit scrolling to the rows above, without moving the cursor."""
    return f"{SAVE}\x1b[1;{shape.top - 1}r{RESTORE}"
