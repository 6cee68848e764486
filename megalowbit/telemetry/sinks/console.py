"""Console output of a run: a live progress bar on a terminal, plain lines in a log.

The console is a sink and receives the facts of every step. Both forms print the same table line every few
steps, and at once for a skipped step. A terminal also has two lines at the bottom that follow each step. The
bar has no thread; it is redrawn when facts arrive, so data loaders may fork at any time.

Files and pipes get ASCII without colours or cursor codes, whatever the environment requests. On a terminal
`NO_COLOR` is respected; a dumb terminal gets plain lines.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megalowbit.standard_streams import write_nothing
from megalowbit.telemetry import columns
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.moving_rate import MovingRate
from megalowbit.telemetry.sinks.base import Sink

HEADING_EVERY = 40  # lines; a heading is never far above on a screen
REDRAW_SECONDS = 0.1
LOG_WIDTH = 120
SHOW_CURSOR = b"\x1b[?25h"  # it is hidden while a bar is drawn


class _Log:
    """A stream that may become unwritable during a run: a reader ends, a terminal closes, a disk is full.

    From the first error on it writes nothing. Says so on stderr, except where a reader has ended.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_stdout, self._stderr = stream, stream is sys.stdout, sys.stderr
        self._is_lost = False

    def write(self, text: str) -> int:
        """Write to the stream, if it is still there."""
        return self._try(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        """Flush the stream, if it is still there."""
        self._try(self._stream.flush, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], Any], otherwise: Any) -> Any:
        if self._is_lost:
            return otherwise
        try:
            return action()
        except OSError as error:
            self._is_lost = True
            if self._is_stdout:
                write_nothing(self._stream)  # other lines, and what is left in the buffer, would fail, too
            if not isinstance(error, BrokenPipeError):
                line = f"the log cannot be written ({error.strerror}): training goes on without it"
                try:
                    print(line, file=self._stderr, flush=True)
                except OSError:  # the same terminal
                    write_nothing(self._stderr)
            return otherwise


class Console(Sink):
    """Shows progress; silent on other processes than the main one.

    Args:
        total_steps: steps of the whole run.
        log_every: steps between two lines.
        start_step: steps trained before this process, when a run is resumed.
        skipped_steps: skipped steps before this process, when a run is resumed.
        is_main: whether this process shows anything.
        file: where to write; standard output if `None`.
        clock: seconds, monotonic.
        has_bar: whether a terminal gets a bar below the lines.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        log_every: int = 10,
        start_step: int = 0,
        skipped_steps: int = 0,
        is_main: bool = True,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
        has_bar: bool = True,
    ) -> None:
        self._total, self._log_every, self._start_step = total_steps, log_every, start_step
        self._step, self._skipped = start_step, skipped_steps
        self._facts: Facts = {}
        self._is_skipped = False
        self._is_main, self._clock = is_main, clock
        self._started, self._drawn = clock(), -REDRAW_SECONDS
        self._steps_per_second = MovingRate(clock=clock)
        self._lines = 0
        file = file or sys.stdout
        is_live = is_main and has_bar and is_terminal(file)
        self._rich = RichConsole(
            file=cast(TextIO, _Log(file)),
            force_terminal=is_live,
            force_jupyter=False,
            color_system="auto" if is_live else None,
            width=None if is_live else LOG_WIDTH,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=not is_live,
        )
        self._live = Live(console=self._rich, auto_refresh=False, transient=True) if is_live else None
        if self._live:
            self._live.start()
            self._live.update(self._foot(), refresh=True)

    def release(self) -> None:
        """Make a terminal usable from another thread, before the process ends; waits for no lock."""
        if self._live:
            with suppress(OSError, ValueError):  # the terminal is gone
                os.write(self._rich.file.fileno(), SHOW_CURSOR)

    @property
    def is_live(self) -> bool:
        """Whether a bar is drawn; only on a terminal."""
        return self._live is not None

    def print(self, text: str, style: str = "") -> None:
        """Show a message above the bar, or as lines of the log."""
        if self._is_main:
            encoding = self._rich.encoding  # one character it lacks must not end a training run
            self._rich.print(Text(text.encode(encoding, "replace").decode(encoding), style=style))

    def write(self, step: int, facts: Facts) -> None:
        """Follow `step`: redraw the bar, and print a line if it is due."""
        if not self._is_main:
            return
        self._step, self._facts = step, facts
        skipped = columns.number(facts.get("skipped_steps"))
        self._is_skipped = skipped is not None and skipped > self._skipped
        self._skipped = self._skipped if skipped is None else int(skipped)
        self._steps_per_second.add(1)
        is_due = (
            step % self._log_every == 0 or step in (self._start_step + 1, self._total) or self._is_skipped
        )
        if is_due:
            self._print_line()
        if self._live and (is_due or self._clock() - self._drawn >= REDRAW_SECONDS):
            self._drawn = self._clock()
            self._live.update(self._foot(), refresh=True)

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:  # noqa: ARG002
        """Remove the bar and print the last step."""
        if not self._is_main:
            return
        if self._live:
            self._live.stop()
        seconds = columns.clock_text(self._clock() - self._started)
        verb = "done" if exit_code == 0 and self._step >= self._total else "stopped"
        self.print(
            f"{verb}: step {self._step}/{self._total} after {seconds}",
            "bold" if exit_code == 0 else "bold red",
        )

    @property
    def _eta(self) -> float | None:
        speed = self._steps_per_second.now
        return (self._total - self._step) / speed if speed else None

    def _print_line(self) -> None:
        if self._lines % HEADING_EVERY == 0:
            self.print(columns.heading(self._total, self._facts), "bold")
        self._lines += 1
        text = columns.line(self._step, self._total, self._facts, eta=self._eta, is_skipped=self._is_skipped)
        self.print(text, "bold yellow" if self._is_skipped else "")

    def _foot(self) -> Group:
        """Two lines: the bar with step, percent, speed and ETA; the latest figures."""
        share = self._step / max(self._total, 1)
        bar = Table.grid(padding=(0, 2, 0, 0), expand=True, pad_edge=False)
        for ratio in (None, 1, None, None, None):
            bar.add_column(ratio=ratio, no_wrap=True, justify="left" if ratio else "right")
        bar.add_row(
            Text(f"{self._step}/{self._total}", style="bold"),
            ProgressBar(
                total=max(self._total, 1), completed=self._step, complete_style="cyan", finished_style="green"
            ),
            Text(f"{share:.0%}", style="bold cyan"),
            Text(f"{columns.amount_text(self._facts.get('tokens_per_second'))} tok/s"),
            Text(f"ETA {columns.clock_text(self._eta)}", style="bold"),
        )
        figures = Text(no_wrap=True, overflow="crop")
        shown = [each for each in columns.columns_of(self._facts) if each.fact != "tokens_per_second"]
        for index, column in enumerate(shown):  # tok/s stands in the bar
            is_alarming = self._is_skipped and column.fact == "skipped_steps"
            figures.append("  " if index else "")
            figures.append(
                columns.SKIP if is_alarming else column.title, style="bold yellow" if is_alarming else "dim"
            )
            figures.append(" ")
            style = "bold yellow" if is_alarming else "bold cyan" if column.fact == "loss" else ""
            figures.append(column.text(self._facts.get(column.fact)), style=style)
        return Group(bar, figures)


def is_terminal(file: TextIO) -> bool:
    """Whether `file` is a terminal that knows control sequences."""
    return file.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
