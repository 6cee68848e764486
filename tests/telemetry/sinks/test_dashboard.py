"""The dashboard in a real pseudo-terminal, as a terminal emulator shows it."""

import fcntl
import io
import logging
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import warnings
from pathlib import Path

import pyte
import pytest
from quick_cases import slow_except

from megalowbit.telemetry.sinks import dashboard
from megalowbit.telemetry.sinks.dashboard import MOST_OF_TIME, NO_TERMINAL, Dashboard, WarningWatch
from megalowbit.telemetry.sinks.terminal_rows import WHOLE_SCREEN

COLOUR = re.compile(rb"\x1b\[(?:\d+;)*3\d[;m]")
ROOT = Path(__file__).parents[3]
BEGIN = """
import logging, os, sys, time, warnings
from megalowbit.telemetry.sinks import dashboard
from megalowbit.telemetry.sinks.dashboard import Dashboard
dashboard.MOST_OF_TIME, dashboard.REDRAW_SECONDS = 1e9, 0.0  # draw every step
console = Dashboard("tiny · nvfp4", 40, log_every=10)
console.print("startup line")
def train(first, last):
    for step in range(first, last + 1):
        console.write(step, {"loss": 6 / step, "lr": 6e-4, "grad_norm": 1.25, "loss_scale": 65536.0,
            "skipped_steps": int(step >= 5), "tokens_per_second": 4321.0, "tokens": 128 * step,
            "step_ms": 29.6, "host_memory_gib": 1.5,
            **({"skipped/tensor": "h.0.weight"} if step == 5 else {}),
            **({"validation/loss": 4.5} if step == 6 else {}),
            **({"speculation/share_int8": 0.75, "speculation/share_bf16": 0.25} if step == 7 else {})})
        time.sleep(0.03)
def wait(word):
    print(word, flush=True)
    sys.stdin.readline()
"""
USUAL = """
train(1, 8)
print("from elsewhere")
os.write(1, b"from a library in C\\n")
logging.getLogger("some.library").warning("odd gradients")
warnings.warn("deprecated", UserWarning)
train(9, 12)
wait("ready")
train(13, 14)
wait("resized")
train(15, 40)
console.close()
print("afterwards")
"""


class Terminal:
    """A program in a pseudo-terminal, and the screen that it shows."""

    def __init__(self, code, *, columns=80, rows=24, **environ):
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.main, secondary = pty.openpty()
        self.resize(columns, rows)
        names = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "PYTHONIOENCODING")
        clean = {name: value for name, value in os.environ.items() if name not in names}
        env = {**clean, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + code],
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            env={**env, **environ},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C comes from the terminal
        )
        os.close(secondary)

    def resize(self, columns, rows):
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if (rows, columns) != (self.screen.lines, self.screen.columns):
            self.screen.resize(rows, columns)

    def read(self, seconds):
        """Follow the output for at most so many seconds; False at its end."""
        if select.select([self.main], [], [], seconds)[0]:
            try:
                more = os.read(self.main, 65536)
            except OSError:  # how Linux reports that the other end has closed
                return False
            self.raw += more
            self.stream.feed(more)
        return True

    def until(self, word):
        """Follow the output until a line of the screen is this word, and a little longer."""
        deadline = time.monotonic() + 200
        while word not in self.lines():
            is_open = self.read(0.1)
            assert is_open, "\n".join(self.lines())
            assert time.monotonic() < deadline, "\n".join(self.lines())
        return self.lines()

    def enter(self):
        os.write(self.main, b"\n")

    def end(self):
        """Follow the output to its end; returns the exit code."""
        deadline = time.monotonic() + 200
        while self.read(0.1):
            assert time.monotonic() < deadline, "\n".join(self.lines())
        os.close(self.main)
        return self.process.wait(timeout=60)

    def lines(self):
        return [line.rstrip() for line in self.screen.display]

    def scrolled(self):
        """Lines that have left the screen at the top, and those on it."""
        before = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        return [line.rstrip() for line in [*before, *self.lines()]]


def index(lines, begin):
    return next(number for number, line in enumerate(lines) if line.startswith(begin))


def test_other_lines_scroll_above_the_figures_of_the_last_step():
    terminal = Terminal(USUAL)
    lines = terminal.until("ready")
    first = index(lines, "── tiny · nvfp4 ───")
    assert lines[first:] == [
        "── tiny · nvfp4 " + "─" * 63,
        "12/40 " + "━" * 17 + "─" * 39 + " 30%  ETA " + lines[first + 1][-7:],
        "loss 0.5000  " + lines[first + 2].split()[2] + "  val 4.5000",
        "lr 6.00e-04  grad norm 1.250  scale 2^16  skips 1  tok/s 4.32k  step 29.6 ms",
        "host 1.5 GiB  tokens 1.54k",
        "precision  int8 75%  bf16 25%",
        "! odd gradients",
        "! UserWarning: deprecated",
    ]
    assert len(lines) == 24
    curve = lines[first + 2].split()[2]
    assert (curve[0], curve[-1], len(curve)) == ("█", "▁", 12)
    above = terminal.scrolled()[: -len(lines) + first]
    for word in ("startup line", "from elsewhere", "from a library in C", "odd gradients"):
        assert above.count(word) == 1, above
    assert [line.split()[0] for line in above if "/40 " in line] == ["1/40", "5/40", "10/40"]
    assert any(line.endswith("UserWarning: deprecated") for line in above)

    terminal.resize(60, 30)
    terminal.enter()
    lines = terminal.until("resized")
    first = index(lines, "── tiny · nvfp4 ───")
    assert len(lines) == 30
    assert lines[first + 1].startswith("14/40 ")
    assert sum(line.startswith("── tiny") for line in lines) == 1, lines
    assert all(len(line) < 60 for line in lines[first:])
    terminal.resize(100, 12)
    terminal.enter()
    assert terminal.end() == 0
    lines = terminal.lines()
    shown = [line for line in lines if line]
    assert shown[-2].startswith("done: step 40/40 after 0:00:0"), lines
    assert shown[-1] == "afterwards"
    assert not any("tiny ·" in line for line in lines), "the dashboard is left on the screen"
    assert terminal.screen.margins is None or terminal.screen.margins == (0, 11), "the region is left"


@pytest.mark.parametrize(
    ("columns", "rows"),
    slow_except(
        [(40, 24), (9, 5), (80, 2)], [(40, 24), (40, 8), (20, 10), (200, 60), (80, 4), (9, 5), (80, 2)]
    ),
)
def test_any_size_has_its_most_important_rows(columns, rows):
    terminal = Terminal("train(1, 12)\nwait('ok')\nconsole.close()\n", columns=columns, rows=rows)
    lines = terminal.until("ok")
    assert len(lines) == rows
    if rows >= 4:
        assert sum(line.startswith("12/40") for line in lines) == 1, lines
    if (columns, rows) == (40, 24):
        first = index(lines, "── tiny")
        assert lines[first + 1].startswith("12/40 ━")
        assert "30%  ETA 0:00:0" in lines[first + 1]
        assert lines[first + 3 :] == [
            "lr 6.00e-04  grad norm 1.250",
            "scale 2^16  skips 1  tok/s 4.32k",
            "step 29.6 ms  host 1.5 GiB",
            "tokens 1.54k",
            "precision  int8 75%  bf16 25%",
            "! step 5 skipped: overflow in h.0.weig…",
        ]
    terminal.enter()
    assert terminal.end() == 0
    assert not any(line.startswith("12/40 ━") for line in terminal.lines())


ENDINGS = {  # what the program does, its last line, its exit code
    "Ctrl-C": (
        "try:\n    train(3, 9999)\nexcept KeyboardInterrupt:\n    console.close(1)\n    print('end')",
        "end",
        0,
    ),
    "crash": (
        "try:\n    train(3, 4)\n    1 / 0\nfinally:\n    console.close(1)\n",
        "ZeroDivisionError: division by zero",
        1,
    ),
    "watchdog": (
        "console.release()\nprint('error: lost', file=sys.stderr, flush=True)\nos._exit(75)",
        "error: lost",
        75,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_terminal_is_as_before_at_any_end(ending):
    code, last, exit_code = ENDINGS[ending]
    terminal = Terminal(f"train(1, 2)\nwait('ok')\n{code}")
    terminal.until("ok")
    before = terminal.lines()
    assert any("tiny ·" in line for line in before), before
    terminal.enter()
    if ending == "Ctrl-C":
        while not any(line.startswith("20/40 ") for line in terminal.lines()):
            assert terminal.read(0.1)
        os.write(terminal.main, b"\x03")
    assert terminal.end() == exit_code
    lines = [line for line in terminal.lines() if line]
    assert not any("tiny ·" in line for line in lines), lines
    assert lines[-1] == last
    after = terminal.raw[terminal.raw.rindex(WHOLE_SCREEN.encode()) :]
    assert b"\x1b[1;" not in after, "a region is set after the end"


def test_no_color_and_plain_encodings_are_respected():
    code = "train(1, 5)\nwait('ok')\nconsole.close()\n"
    plain = Terminal(code, NO_COLOR="1", PYTHONIOENCODING="ascii")
    lines = plain.until("ok")
    first = index(lines, "-- tiny ? nvfp4 --")
    assert lines[first + 1].startswith("5/40 ######")
    assert set("".join(lines[first + 2].split()[2:])) <= set("_.-=+*#@")
    assert "".join(lines[first:]).isascii()
    plain.enter()
    assert plain.end() == 0
    assert not COLOUR.search(plain.raw)
    colours = Terminal(code)
    colours.until("ok")
    colours.enter()
    assert colours.end() == 0
    assert COLOUR.search(colours.raw)


def test_without_a_terminal_one_line_says_so(monkeypatch):
    file = io.StringIO()
    console = Dashboard("tiny", 4, file=file, log_every=2)
    for step in range(1, 5):
        console.write(step, {"loss": 1.0})
    console.close()
    lines = file.getvalue().splitlines()
    assert lines[0] == NO_TERMINAL
    assert [line.split()[0] for line in lines[2:-1]] == ["1/4", "2/4", "4/4"]
    assert not console.is_live
    silent = io.StringIO()
    Dashboard("tiny", 4, file=silent, is_main=False).write(1, {"loss": 1.0})
    assert silent.getvalue() == ""
    dumb = Terminal("train(1, 2)\nconsole.close()\n", TERM="dumb")
    assert dumb.end() == 0
    assert b"\x1b" not in dumb.raw
    assert NO_TERMINAL.encode() in dumb.raw


class FakeTerminal(io.StringIO):
    """A terminal for the code, with a file descriptor that is none."""

    encoding = "utf-8"

    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_failure_is_said_once_and_the_lines_go_on(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = FakeTerminal()
    console = Dashboard("tiny", 40, file=file, log_every=1)
    handlers = list(logging.getLogger().handlers)
    for step in range(1, 4):
        console.write(step, {"loss": 1.0})  # the size of this terminal cannot be found
    console.close()
    lines = file.getvalue().splitlines()
    assert sum("the dashboard failed and is off (" in line for line in lines) == 1
    shown = [line.split()[0] for line in lines if line.lstrip().split("/")[0].isdigit()]
    assert shown == ["1/40", "2/40", "3/40"]
    assert logging.getLogger().handlers == handlers


def test_drawing_takes_at_most_a_hundredth_of_the_time(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    clock, drawn = Clock(), []

    class Rows:
        def __init__(self, file):
            pass

        def size(self):
            return 79, 20

        def draw(self, lines):
            clock.now += 0.02
            drawn.append(clock.now)

        def close(self):
            pass

    monkeypatch.setattr(dashboard, "TerminalRows", Rows)
    console = Dashboard("tiny", 100_000, file=FakeTerminal(), clock=clock, log_every=10**6)
    for step in range(1, 10_001):
        clock.now += 0.001
        console.write(step, {"loss": 1.0})
    console.close()
    assert len(drawn) * 0.02 <= MOST_OF_TIME * clock.now + 0.02
    assert len(drawn) > 3


def test_warnings_are_noted_and_still_shown(monkeypatch):
    found, shown = [], []

    def shown_before(message, category, *place):
        shown.append((str(message), category, *place))

    monkeypatch.setattr(warnings, "showwarning", shown_before)
    watch = WarningWatch(found.append)
    watch.start()
    logging.getLogger("a.b").warning("first %s", 1)
    logging.getLogger("a.b").info("not a warning")
    warnings.showwarning(UserWarning("second"), UserWarning, "file.py", 3)
    watch.stop()
    assert warnings.showwarning is shown_before
    logging.getLogger("a.b").warning("after the end")
    assert found == ["first 1", "UserWarning: second"]
    assert shown == [("second", UserWarning, "file.py", 3)]


def test_sigterm_ends_a_run_with_the_terminal_restored():
    """SIGTERM is polled by the loop, which then closes the console as at any other end."""
    terminal = Terminal(
        "from megalowbit.pretrain.stopping.signals import block_stop_signals, pending_stop_signal\n"
        "block_stop_signals()\ntrain(1, 1)\nwait('ok')\n"
        "for step in range(2, 41):\n    train(step, step)\n    if pending_stop_signal():\n        break\n"
        "console.close()\nos._exit(0)\n"
    )
    terminal.until("ok")
    terminal.process.send_signal(signal.SIGTERM)
    terminal.enter()
    assert terminal.end() == 0
    lines = [line for line in terminal.lines() if line]
    assert lines[-1].startswith("stopped: step ")
    assert not any("tiny ·" in line for line in lines)
