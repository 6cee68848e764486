"""Ends a run that cannot go on, in time and with one line: which rank is the cause, where others wait.

A collective with a lost rank fails after the group's timeout, or waits for ever where the backend has none.
Two threads look after that: the heartbeat (`supervision.heartbeat`) talks to the other ranks, and this file's
thread, which needs no network, ends the process when the loop has made no progress, when another rank has
raised the alarm and the main thread does not come out by itself, or when SIGTERM waits and no step ends
(that alone where there is no timeout, and with no heartbeat).
Where a collective fails with an error, that error becomes a `TransientError` with the diagnosis. A rank that
fails for any other reason lets the others know first, so that they name it instead of its silence.

Ending is `os._exit`, for a thread that hangs in C cannot be unwound; files written by renaming stay whole.
Where even this thread does not get to run (an extension that keeps the interpreter's lock), `faulthandler`
ends the process from C. Not covered: ranks that are lost before the loop begins or after it has ended,
where torch's own timeouts hold.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple

from megalowbit.distributed import process_group
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.durable_files import open_regular
from megalowbit.errors import EXIT_TRANSIENT, EXIT_USER_ERROR, TransientError, UserError
from megalowbit.supervision.collective_trace import is_failed_collective, trace_of_error, trace_of_frame
from megalowbit.supervision.diagnosis import (
    Diagnosis,
    describe_rank,
    diagnose,
    diagnose_together,
    name_ranks,
    wait_until_known,
)
from megalowbit.supervision.heartbeat import HeartbeatThread, StoreSilentError
from megalowbit.supervision.heartbeat_store import (
    DEFECT,
    INTERRUPT,
    LOSS,
    MISTAKE,
    REPORTS_SIGTERM,
    FailureReport,
    Heartbeat,
    HeartbeatStore,
)
from megalowbit.supervision.settings import WatchdogSettings
from megalowbit.supervision.timeouts import set_group_timeouts

EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_CODES = MappingProxyType({MISTAKE: EXIT_USER_ERROR, INTERRUPT: 128 + signal.SIGINT})
TIMEOUTS_WITHOUT_PROGRESS = 1.1  # a little later than the collectives' own, which end a run more cleanly
INTERVALS_TO_COME_OUT = 0.5
INTERVALS_TO_END = 6.0  # `wait_until_known` takes 4.5 where the store falls silent; the rest is for printing
BEGINNING = "the beginning"
STEPS_REMEMBERED, STEPS_NEEDED = 50, 10
LONGEST_LINE = 300  # characters of another rank's error


class _Mark(NamedTuple):
    what: str
    time: float
    is_save: bool = False


class _Termination(NamedTuple):
    """When a waiting SIGTERM was first seen at a mark."""

    mark: _Mark
    time: float
    heartbeats: dict[int, Heartbeat] | None


def print_error(error: UserError) -> None:
    """As command lines print it; by one rank."""
    if not error.is_reported:
        print(f"error: {error}", file=sys.stderr, flush=True)


class Watchdog:
    """Looks after a training loop, as a context around it; with one rank too.

    With `timeout` None it reports slow steps, and ends a process that does not come to see a SIGTERM.
    """

    def __init__(
        self,
        settings: WatchdogSettings,
        identity: ProcessIdentity,
        *,
        folder: Path | None = None,
        report: Callable[[UserError], None] = print_error,
    ) -> None:
        """Prepare; the block begins to count.

        In `folder`, if there is one, a rank that hangs leaves its stack, `stack-rank<r>.txt`. `report` says why
        this process ends where its thread must end it, within seconds; called on every such rank, with
        `is_reported` where another one prints it.
        """
        self._settings, self._rank, self._folder, self._report = settings, identity.rank, folder, report
        self._host = socket.gethostname()
        self._mark = _Mark(BEGINNING, 0.0)
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._main_thread = 0
        self._place: str | None = None  # of a collective that has failed already
        self._is_done = self._is_finished = False
        self._raised: BaseException | None = None  # by `finish`
        self._heartbeat_thread: HeartbeatThread | None = None
        self._diagnosis: Diagnosis | None = None
        self._diagnosis_lock = threading.Lock()
        self._alarmed, self._leaving, self._stopped = (threading.Event() for _ in range(3))
        self._sigterm: _Termination | None = None
        self._thread = threading.Thread(target=self._watch, name="megalowbit-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._main_thread = threading.get_ident()
        self.mark(BEGINNING)
        if self._settings.timeout is not None:
            set_group_timeouts(timedelta(seconds=self._settings.timeout), is_watched=True)
        if self._settings.timeout is not None and process_group.world_size() > 1:
            self._heartbeat_thread = HeartbeatThread(
                HeartbeatStore(self._rank, process_group.world_size()),
                self._describe,
                interval=self._settings.interval,
                at_alarm=self._alarmed.set,
            )
            self._heartbeat_thread.start()
        self._thread.start()
        return self

    def mark(self, what: str, *, is_save: bool = False) -> None:
        """Progress, in a microsecond: the loop goes on, with `"step 8"` or `"the save of step 8"`.

        Where SIGTERM has come, what begins with `is_save` is worth waiting for: it has all of `timeout`.
        """
        self._mark = _Mark(what, time.monotonic(), is_save)

    def finish(self) -> None:
        """All that ranks do together is done: what befalls another rank from here on is no failure of this.

        Call it before the run is marked as finished, and leave the block soon.

        Raises:
            TransientError: another rank has failed before.
        """
        self.mark("the end", is_save=True)
        self._is_finished = True  # first: an alarm that is not seen below must not be acted on
        self._raise_alarm()

    def step_ended(self, seconds: float) -> str | None:
        """A warning if a step, without saves, was far slower than those before it."""
        limit, count = self._settings.slow_step, len(self._steps)
        median = statistics.median(self._steps) if count >= STEPS_NEEDED else None
        self._steps.append(seconds)
        if limit is None or median is None or seconds <= limit * median:
            return None
        return (
            f"the step took {seconds:.3g} s, {seconds / median:.0f} times the median of the last {count} "
            f"({median:.3g} s)"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._leave(error)
        finally:
            self._is_done = error is None
            self._stopped.set()
            self._thread.join(self._settings.interval)  # or it might arm the backstop once more
            faulthandler.cancel_dump_traceback_later()
            if self._heartbeat_thread is not None:
                self._heartbeat_thread.stop(is_done=error is None)

    def _leave(self, error: BaseException | None) -> None:
        """Raise the diagnosis in the place of `error`, if others are the reason; report it, if it is ours."""
        if self._heartbeat_thread is None or (isinstance(error, UserError) and error.is_on_all_ranks):
            return
        if error is None:
            if not self._is_finished:  # a rank that has failed will not come to what follows
                self._raise_alarm()
            return
        if error is self._raised:
            return
        if not isinstance(error, Exception) or not is_failed_collective(error):
            self._publish_failure(error)
            return
        self._place = trace_of_error(error).text
        self._leaving.set()
        diagnosis = self._find_out()
        if diagnosis.is_open:
            diagnosis = diagnosis._replace(line=f"{diagnosis.line} ({_on_a_line(error)})")
        wait_until_known(self._heartbeat_thread)
        raise _error(diagnosis) from error

    def _raise_alarm(self) -> None:
        """Raise the diagnosis, if another rank has failed."""
        if self._heartbeat_thread is None or not self._alarmed.is_set():
            return
        self._leaving.set()
        self._raised = error = _error(self._find_out())
        wait_until_known(self._heartbeat_thread)
        raise error

    def _publish_failure(self, error: BaseException) -> None:
        """Let the others know why this rank ends."""
        assert self._heartbeat_thread is not None
        self._leaving.set()
        failure = FailureReport(
            rank=self._rank,
            host=self._host,
            mark=self._mark.what,
            line=_on_a_line(error),
            kind=_kind_of(error),
        )
        try:
            self._heartbeat_thread.ask(lambda store: store.report(failure))
        except StoreSilentError:
            return  # the error itself is still printed here
        wait_until_known(self._heartbeat_thread)

    def _find_out(self) -> Diagnosis:
        """The diagnosis; found once, by whichever thread comes first."""
        assert self._heartbeat_thread is not None
        with self._diagnosis_lock:
            if self._diagnosis is None:
                self._diagnosis = diagnose_together(
                    self._heartbeat_thread, lambda: self._describe(0), rank=self._rank
                )
                if self._diagnosis.is_hang and self._folder is not None:
                    self._diagnosis = self._diagnosis._replace(
                        line=f"{self._diagnosis.line} (its stack: {self._folder / 'stack-rank*.txt'})"
                    )
            return self._diagnosis

    def _describe(self, count: int) -> Heartbeat:
        mark, place, is_waiting = self._mark, self._place, True
        if place is None:
            place, is_waiting = trace_of_frame(sys._current_frames().get(self._main_thread))
        return Heartbeat(
            count=count,
            mark=mark.what,
            seconds=round(time.monotonic() - mark.time, 1),
            place=place,
            is_waiting=is_waiting,
            is_done=self._is_done,
            host=self._host,
        )

    # the thread

    def _watch(self) -> None:
        timeout = self._settings.timeout
        while not self._stopped.wait(self._settings.interval / 2):
            if self._leaving.is_set():
                continue  # the main thread is out, and every step it takes from there has a time limit
            if timeout is not None:
                self._arm_backstop(timeout)
            if self._alarmed.is_set() and not self._is_finished:
                self._end_with_others()
            elif timeout and time.monotonic() - self._mark.time > TIMEOUTS_WITHOUT_PROGRESS * timeout:
                self._end_of_patience()
            elif self._is_termination_overdue():
                self._end_by_signal()

    def _arm_backstop(self, seconds: float) -> None:
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)

    def _end_with_others(self) -> None:
        """Another rank has raised the alarm: end, unless the main thread comes out by itself."""
        diagnosis = self._find_out()
        if not self._leaving.wait(INTERVALS_TO_COME_OUT * self._settings.interval):
            self._end(diagnosis)

    def _end_of_patience(self) -> None:
        if self._heartbeat_thread is None:
            own = self._describe(0)
            who = name_ranks([self._rank], {self._rank: own})
            self._end(
                Diagnosis(f"{who} hangs since {own.mark}, for {own.seconds:.0f} s: it is in {own.place}")
            )
        else:
            self._end_with_others()

    def _is_termination_overdue(self) -> bool:
        """Whether SIGTERM waits to be seen by the loop, and the loop has not come to look for long."""
        if signal.SIGTERM not in signal.sigpending():
            return False
        mark = self._mark
        if self._sigterm is None or self._sigterm.mark is not mark:
            self._sigterm = _Termination(mark, time.monotonic(), self._first_heartbeats())
        seconds = time.monotonic() - self._sigterm.time
        return not mark.is_save and seconds > self._settings.termination_seconds

    def _first_heartbeats(self) -> dict[int, Heartbeat] | None:
        """Everybody's, for the one rank that will report what has become of them; None for the others."""
        if self._heartbeat_thread is None:
            return {}
        try:
            if not self._heartbeat_thread.ask(lambda store: store.claim(REPORTS_SIGTERM)):
                return None
            return self._heartbeat_thread.ask(lambda store: store.heartbeats())
        except StoreSilentError:
            return {}

    def _end_by_signal(self) -> None:
        assert self._sigterm is not None
        self._arm_backstop(INTERVALS_TO_END * self._settings.interval)
        since = f"no step has ended for {self._settings.termination_seconds:g} s"
        what = self._state_since(self._sigterm.heartbeats or {})
        error = TransientError(f"ended by SIGTERM without a checkpoint, for {since}: {what}")
        error.is_reported = self._sigterm.heartbeats is None
        self._report(error)
        os._exit(EXIT_TERMINATED)

    def _state_since(self, first: dict[int, Heartbeat]) -> str:
        """What has become of the ranks since a first reading; of this one, where there was none."""
        own = describe_rank(self._rank, self._describe(0))
        if self._heartbeat_thread is None or not first:
            return own
        try:
            return diagnose(
                self._heartbeat_thread.ask(lambda store: store.snapshot(first)), observer=self._rank
            )
        except StoreSilentError:
            return own

    def _end(self, diagnosis: Diagnosis) -> None:
        # a terminal or a disk may hang as well
        self._arm_backstop(INTERVALS_TO_END * self._settings.interval)
        error = _error(diagnosis)
        if isinstance(error, UserError):
            self._report(error)
        trace = trace_of_frame(sys._current_frames().get(self._main_thread))
        if not trace.is_waiting and self._folder is not None:
            # the line has been printed, which matters more than a disk that is full
            path = self._folder / f"stack-rank{self._rank}.txt"
            with suppress(OSError, UserError), open_regular(path, "w") as file:
                faulthandler.dump_traceback(file)
        if self._heartbeat_thread is not None:
            wait_until_known(self._heartbeat_thread)
        os._exit(EXIT_CODES.get(diagnosis.kind, EXIT_TRANSIENT))


def _on_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    line = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}".removesuffix(": ")
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"


def _kind_of(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPT
    if isinstance(error, TransientError):
        return LOSS
    return MISTAKE if isinstance(error, UserError) else DEFECT


def _error(diagnosis: Diagnosis) -> UserError | KeyboardInterrupt:
    """What this rank raises for what has happened elsewhere."""
    if diagnosis.kind == INTERRUPT:
        return KeyboardInterrupt(diagnosis.line)
    if diagnosis.kind == MISTAKE:
        error = UserError(diagnosis.line)
    else:
        error = TransientError(f"{diagnosis.line}; continue from the last checkpoint")
    error.is_reported = not diagnosis.is_local
    return error
