"""The reserved rows of a terminal, as a terminal emulator shows what is written."""

import os

import pyte
import pytest

from megalowbit.telemetry.sinks import terminal_rows
from megalowbit.telemetry.sinks.terminal_rows import ROWS_ABOVE, TerminalRows


class Emulated:
    """A file that is an emulated terminal, with a line break as terminals make of `\\n`."""

    def __init__(self, columns=20, rows=10):
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.Stream(self.screen)

    def fileno(self):
        return 99

    def write(self, text):
        self.stream.feed(text.replace("\n", "\r\n"))

    def flush(self):
        pass

    def resize(self, columns, rows):
        self.screen.resize(rows, columns)

    @property
    def lines(self):
        return [line.rstrip() for line in self.screen.display]


@pytest.fixture
def terminal(monkeypatch):
    terminal = Emulated()
    size = lambda _: os.terminal_size((terminal.screen.columns, terminal.screen.lines))  # noqa: E731
    monkeypatch.setattr(terminal_rows.os, "get_terminal_size", size)
    return terminal


def test_lines_scroll_above_the_rows(terminal):
    rows = TerminalRows(terminal)
    terminal.write("first\n")
    rows.draw(["one", "two"])
    assert terminal.lines == ["first", *[""] * 7, "one", "two"]
    for number in range(20):
        terminal.write(f"line {number}\n")
        rows.draw([f"one {number}", "two"])
    assert terminal.lines == [*(f"line {number}" for number in range(13, 20)), "", "one 19", "two"]
    rows.close()
    assert terminal.lines == [*(f"line {number}" for number in range(13, 20)), "", "", ""]
    terminal.write("after\n")
    assert terminal.lines[7:] == ["after", "", ""]


def test_a_full_screen_scrolls_for_the_rows(terminal):
    for number in range(30):
        terminal.write(f"line {number}\n")
    rows = TerminalRows(terminal)
    rows.draw(["one", "two", "three"])
    assert terminal.lines == [*(f"line {number}" for number in range(24, 30)), "", "one", "two", "three"]


def test_more_rows_push_the_lines_up_and_fewer_leave_blanks(terminal):
    rows = TerminalRows(terminal)
    for number in range(9):
        terminal.write(f"line {number}\n")
    rows.draw(["one"])
    rows.draw(["one", "two", "three"])
    assert terminal.lines == [*(f"line {number}" for number in range(3, 9)), "", "one", "two", "three"]
    terminal.write("line 9\n")
    assert terminal.lines[5:7] == ["line 9", ""]
    rows.draw(["one"])
    assert terminal.lines[7:] == ["one", "", ""]


@pytest.mark.parametrize("size", [(20, 16), (30, 10), (12, 10), (12, 7), (30, 24)])
def test_another_size_leaves_one_copy_of_the_rows_at_the_end(terminal, size):
    rows = TerminalRows(terminal)
    for number in range(20):
        terminal.write(f"line {number}\n")
    rows.draw(["= one", "= two"])
    terminal.resize(*size)
    rows.draw(["= one", "= two"])
    assert terminal.lines[-2:] == ["= one", "= two"]
    assert sum(line.startswith("=") for line in terminal.lines) == 2
    for number in range(20, 60):
        terminal.write(f"line {number}\n")
        rows.draw(["= one", "= two"])
    above = size[1] - 3
    assert terminal.lines == [*(f"line {n}" for n in range(60 - above, 60)), "", "= one", "= two"]
    rows.close()
    assert not any(line.startswith("=") for line in terminal.lines)


def test_a_small_terminal_has_no_rows(terminal):
    rows = TerminalRows(terminal)
    assert rows.size() == (19, 10 - ROWS_ABOVE)
    rows.draw(["one"])
    terminal.resize(20, ROWS_ABOVE)
    assert rows.size() == (19, 0)
    rows.draw(["one"])
    terminal.write("x\ny\nz")
    assert terminal.lines == ["x", "y", "z"]
    rows.close()
    terminal.resize(20, 8)
    rows.draw(["one"] * 20)
    assert terminal.lines.count("one") == 5


def test_a_release_writes_to_the_descriptor_and_forgives_a_lost_terminal(terminal, monkeypatch):
    rows = TerminalRows(terminal)
    rows.release()  # nothing is reserved
    rows.draw(["one"])
    written = []
    monkeypatch.setattr(terminal_rows.os, "write", lambda fd, data: written.append((fd, data)))
    rows.release()
    assert [fd for fd, _ in written] == [99]
    terminal.write(written[0][1].decode())
    assert "one" not in terminal.lines
    monkeypatch.setattr(terminal_rows.os, "write", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    rows.release()
