"""`--ui rich`: a dashboard in the last rows of the terminal, below the lines of a plain log.

It is a console whose lines scroll above the dashboard (`terminal_rows.py`); `dashboard_frame.py` says what is
in it. There is no thread: it is drawn when facts arrive, at most ten times a second and never for more than
one hundredth of the time. If anything about it fails, a line says so once, and the run goes on without it.

Warnings of the `logging` and `warnings` modules are shown as always, and the newest ones stay in the
dashboard. Not covered: warnings of loggers that do not propagate, such as DeepSpeed's, which only scroll by.
"""

from __future__ import annotations

import io
import logging
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console as RichConsole

from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.sinks.console import REDRAW_SECONDS, Console, is_terminal
from megalowbit.telemetry.sinks.dashboard_frame import RunState, frame, one_line
from megalowbit.telemetry.sinks.terminal_rows import TerminalRows

MOST_OF_TIME = 0.01  # that drawing may take
NO_TERMINAL = "--ui rich: standard output is no terminal that can move its cursor; plain lines follow"


class Dashboard(Console):
    """A console with a dashboard on a terminal, else one that prints plain lines and says why.

    Args:
        title: of the run, such as its folder's name.
        total_steps: steps of the whole run.
        file: where to write; standard output if `None`.
        clock: seconds, monotonic.
        more: further arguments of `Console`.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **more: Any,
    ) -> None:
        super().__init__(total_steps, file=file, clock=clock, has_bar=False, **more)
        file = file or sys.stdout
        self._state = RunState(title=title, total_steps=total_steps)
        self._rows: TerminalRows | None = None
        self._warnings: WarningWatch | None = None
        self._cost = 0.0  # seconds of the last draw
        if not self._is_main:
            return
        if not is_terminal(file):
            self.print(NO_TERMINAL)
            return
        self._rows = TerminalRows(file)
        self._is_ascii = not (file.encoding or "").lower().startswith("utf")

    @property
    def is_live(self) -> bool:
        """Whether there is a dashboard."""
        return self._rows is not None

    def write(self, step: int, facts: Facts) -> None:
        """Follow `step`: print a line if it is due, and draw."""
        super().write(step, facts)
        if self._rows is None:
            return
        try:
            if self._warnings is None:
                self._warnings = WarningWatch(self._state.warnings.append)
                self._warnings.start()
            self._state.add(step, facts, self._eta)
            pause = max(REDRAW_SECONDS, self._cost / MOST_OF_TIME)
            if self._is_first_draw or step == self._total or self._clock() - self._drawn >= pause:
                self._draw(self._rows)
        except Exception as error:  # anything at all: a picture is not worth a training run
            self._turn_off(error)

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:
        """Return the rows to the terminal and print the last step."""
        try:
            self._end()
        except Exception as error:
            self._turn_off(error)
        super().close(exit_code, summary)

    def release(self) -> None:
        """Return the rows to the terminal from another thread, before the process ends."""
        if self._rows is not None:
            self._rows.release()

    @property
    def _is_first_draw(self) -> bool:
        return not self._cost

    def _draw(self, rows: TerminalRows) -> None:
        started = self._clock()
        width, height = rows.size()
        lines = frame(self._state, width, height, is_ascii=self._is_ascii)
        # in this console's encoding, which may lack a character of a warning
        encoding = self._rich.encoding
        with io.StringIO() as text:
            painter = RichConsole(
                file=text, force_terminal=True, force_jupyter=False, width=max(width, 1), highlight=False,
                legacy_windows=False,
            )  # fmt: skip
            for line in lines:
                painter.print(line, no_wrap=True, crop=True, soft_wrap=True)
            shown = text.getvalue().encode(encoding, "replace").decode(encoding).split("\n")[: len(lines)]
        rows.draw(shown)
        self._drawn = self._clock()
        self._cost = max(self._drawn - started, sys.float_info.min)

    def _end(self) -> None:
        """Return the rows, and stop watching warnings."""
        rows, self._rows = self._rows, None
        watch, self._warnings = self._warnings, None
        if watch is not None:
            watch.stop()
        if rows is not None:
            rows.close()

    def _turn_off(self, error: Exception) -> None:
        with suppress(Exception):  # reported below, whichever it is
            self._end()
        reason = one_line(str(error)) or type(error).__name__
        self.print(f"the dashboard failed and is off ({reason}); the run goes on with plain lines")


class WarningWatch(logging.Handler):
    """Passes on the text of each warning between `start` and `stop`; warnings are shown as before.

    Args:
        note: called with each text.
    """

    def __init__(self, note: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._note = note
        self._show: Any = None  # of the module `warnings`, before `start`

    def start(self) -> None:
        """Watch the loggers and the module `warnings`."""
        logging.getLogger().addHandler(self)
        self._show, warnings.showwarning = warnings.showwarning, self._show_warning

    def stop(self) -> None:
        """Stop, and restore what was there before."""
        logging.getLogger().removeHandler(self)
        if warnings.showwarning == self._show_warning:  # else another has replaced it since
            warnings.showwarning = self._show

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record, and print it as `logging` would if no handler were there."""
        try:
            self._note(record.getMessage())
        except Exception:
            self.handleError(record)
        last = logging.lastResort
        if last is not None and not self._has_other_handler(record.name):
            last.handle(record)

    def _has_other_handler(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False

    def _show_warning(self, message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        self._note(f"{category.__name__}: {message}")
        self._show(message, category, *rest, **more)
