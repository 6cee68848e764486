"""Ends a run that cannot continue, within a time limit, and names the faulty rank in one line.

A collective with a lost rank fails after the group's timeout, or never returns if the backend has none. Two
threads supervise the main thread. The heartbeat thread (`supervision.heartbeat`) exchanges heartbeats with
the other ranks. The watchdog thread in this file needs no network. It ends the process if

- the training loop has made no progress for 1.1 timeouts,
- another rank has raised the alarm or is silent, and the main thread does not return on its own,
- the store does not answer, or has ended with the main process,
- the store has ended with the launcher, and no step ends (the ranks of a killed launcher may be healthy), or
- SIGTERM is pending and no step ends. Without a timeout this is the only check, and there is no heartbeat.

If a collective raises an error, the `with` block raises a `TransientError` with the diagnosis instead. A rank
that fails for any other reason reports it first, and the others then name that error.

The process ends by `os._exit`, because a thread that hangs in C cannot be unwound; files written by renaming
stay complete. If an extension holds the interpreter lock, this thread cannot run either, and `faulthandler`
ends the process from C. Not covered: ranks lost before the loop begins or after it has ended, where torch's
timeouts apply.
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
from megalowbit.errors import EXIT_TRANSIENT, EXIT_USER_ERROR, HUNG, OVERDUE, TransientError, UserError
from megalowbit.supervision.collective_trace import is_failed_collective, trace_of_error, trace_of_frame
from megalowbit.supervision.diagnosis import (
    Diagnosis,
    describe_rank,
    diagnose,
    diagnose_together,
    name_ranks,
    wait_for_readers,
)
from megalowbit.supervision.flight_recorder import record_prefix, write_record
from megalowbit.supervision.heartbeat import HeartbeatThread, NeighbourWatch, StoreSilentError
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
TIMEOUTS_WITHOUT_PROGRESS = 1.1  # a little after the collectives' timeout, which ends a run more cleanly
INTERVALS_TO_UNWIND = 0.5
ANSWERS_TO_END = 3.0  # `wait_for_readers` takes 2.25 if the store stops answering; the rest is for printing
BEGINNING = "the start"
STEPS_REMEMBERED, STEPS_NEEDED = 50, 10
STEPS_WITHOUT_LAUNCHER = 3.0  # times the median: how long a step may continue after its launcher has ended
LONGEST_LINE = 300  # characters of another rank's error


class _Mark(NamedTuple):
    what: str
    time: float
    is_save: bool = False


class _Termination(NamedTuple):
    """When a pending SIGTERM was first seen during a mark."""

    mark: _Mark
    time: float
    heartbeats: dict[int, Heartbeat] | None


def print_error(error: UserError) -> None:
    """Print an error as the command lines do, unless another rank prints it."""
    if not error.is_reported:
        print(f"error: {error}", file=sys.stderr, flush=True)


class Watchdog:
    """Context manager that watches a training loop. Also works with a single rank.

    With `timeout` None it only reports slow steps and ends a process that does not react to SIGTERM.
    """

    def __init__(
        self,
        settings: WatchdogSettings,
        identity: ProcessIdentity,
        *,
        folder: Path | None = None,
        report: Callable[[UserError], None] = print_error,
    ) -> None:
        """Create the watchdog; monitoring starts when the block is entered.

        Args:
            settings: timeouts and thresholds.
            identity: this process's rank.
            folder: a rank that hangs writes its stack there, to `stack-rank<r>.txt`; None: nowhere.
            report: prints why the process ends, if the watchdog's thread ends it. Must return within
                seconds. It is called on every such rank; `error.is_reported` is set if another rank prints
                the error.
        """
        self._settings, self._rank, self._folder, self._report = settings, identity.rank, folder, report
        self._host = socket.gethostname()
        self._mark = _Mark(BEGINNING, 0.0)
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._main_thread = 0
        self._place: str | None = None  # of a collective that has already failed
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
            self._heartbeat_thread = self._new_heartbeat_thread()
            self._heartbeat_thread.start()
        self._thread.start()
        return self

    def _new_heartbeat_thread(self) -> HeartbeatThread:
        settings, size, watch = self._settings, process_group.world_size(), None
        if settings.silence is not None:
            watch = NeighbourWatch(self._rank, size, limit=settings.silence, interval=settings.interval)
        return HeartbeatThread(
            HeartbeatStore(self._rank, size),
            self._describe,
            interval=settings.interval,
            seconds_to_answer=settings.seconds_to_answer,
            on_alarm=self._alarmed.set,
            neighbour_watch=watch,
        )

    def mark(self, what: str, *, is_save: bool = False) -> None:
        """Report progress: the loop begins `what`, such as `"step 8"`; costs about a microsecond.

        After SIGTERM a phase marked with `is_save` may take all of `timeout`.
        """
        self._mark = _Mark(what, time.monotonic(), is_save)

    def finish(self) -> None:
        """Declare that no operation involves other ranks any more; their later failures do not end this one.

        Call it before the run is marked as finished, and leave the block soon.

        Raises:
            TransientError: another rank has already failed.
        """
        self.mark("the end", is_save=True)
        self._is_finished = True  # set first: an alarm that arrives after the check below must be ignored
        self._raise_alarm()

    def step_ended(self, seconds: float) -> str | None:
        """Record the duration of a step without saves; return a warning if it was unusually slow."""
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
        self._leaving.set()  # first: the thread may be about to end this process for an earlier alarm
        try:
            self._leave(error)
        finally:
            self._is_done = error is None
            self._stopped.set()
            self._thread.join(self._settings.interval)  # otherwise it could arm the backstop again
            faulthandler.cancel_dump_traceback_later()
            if self._heartbeat_thread is not None:
                self._heartbeat_thread.stop(is_done=error is None)

    def _leave(self, error: BaseException | None) -> None:
        """Replace `error` by the diagnosis if another rank caused it; otherwise report it to the others."""
        if self._heartbeat_thread is None or (isinstance(error, UserError) and error.is_on_all_ranks):
            return
        if error is None:
            if not self._is_finished:  # a rank that has failed would not take part in what follows
                self._raise_alarm()
            return
        if error is self._raised:
            return
        if not isinstance(error, Exception) or not is_failed_collective(error):
            self._publish_failure(error)
            return
        self._place = trace_of_error(error).text
        diagnosis = self._diagnose()
        if diagnosis.is_open:
            diagnosis = diagnosis.with_note(_one_line(error))
        wait_for_readers(self._heartbeat_thread)
        raise diagnosis.error() from error

    def _raise_alarm(self) -> None:
        """Raise the diagnosis if another rank has failed."""
        if self._heartbeat_thread is None or not self._alarmed.is_set():
            return
        self._leaving.set()
        self._raised = error = self._diagnose().error()
        wait_for_readers(self._heartbeat_thread)
        raise error

    def _publish_failure(self, error: BaseException) -> None:
        """Report to the other ranks why this rank ends."""
        assert self._heartbeat_thread is not None
        failure = FailureReport(
            rank=self._rank,
            host=self._host,
            mark=self._mark.what,
            line=_one_line(error),
            kind=_kind_of(error),
        )
        try:
            self._heartbeat_thread.execute(lambda store: store.report(failure))
        except StoreSilentError:
            return  # this rank still prints the error
        wait_for_readers(self._heartbeat_thread)

    def _diagnose(self) -> Diagnosis:
        """The diagnosis, made once by the first thread that needs it."""
        assert self._heartbeat_thread is not None
        with self._diagnosis_lock:
            if self._diagnosis is None:
                self._diagnosis = diagnose_together(
                    self._heartbeat_thread, lambda: self._describe(0), rank=self._rank
                )
                if self._diagnosis.is_hang and self._folder is not None:
                    self._diagnosis = self._diagnosis.with_note(
                        f"its stack: {self._folder / 'stack-rank*.txt'}"
                    )
                silent = self._heartbeat_thread.silent
                if self._diagnosis.is_open and silent is not None:  # it answers again, but too late
                    self._diagnosis = self._diagnosis.with_note(
                        f"rank {silent} was silent for {self._settings.silence:g} s"
                    )
                self._write_flight_record()
            return self._diagnosis

    def _write_flight_record(self) -> None:
        """Write this rank's last collectives, after a loss or hang, and name the ranks' files in the line."""
        prefix = record_prefix()
        if prefix is None or self._diagnosis is None or self._diagnosis.kind != LOSS:
            return
        if write_record(prefix, self._rank, seconds=self._settings.interval):
            self._diagnosis = self._diagnosis.with_note(f"last collectives of each rank: {prefix}*")

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
                continue  # the main thread has left the block; from there on every operation has a time limit
            if timeout is not None:
                self._arm_backstop(timeout)
            if self._is_alarmed() and not self._is_finished:
                self._end_after_alarm()
            elif timeout and time.monotonic() - self._mark.time > TIMEOUTS_WITHOUT_PROGRESS * timeout:
                self._end_without_progress()
            elif self._is_termination_overdue():
                self._end_by_signal()
            elif self._is_overdue_without_launcher():
                self._end_without_launcher()

    def _arm_backstop(self, seconds: float) -> None:
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)

    def _is_alarmed(self) -> bool:
        """Whether another rank has failed or is silent, or the store does not answer or is lost.

        A store that has ended with the launcher is no alarm. After SIGTERM no lost store is: the signal
        ends the main process, and soon this one.
        """
        thread, silence = self._heartbeat_thread, self._settings.silence
        if thread is None or (thread.lost is not None and signal.SIGTERM in signal.sigpending()):
            return False
        return self._alarmed.is_set() or (silence is not None and thread.busy_seconds > silence)

    def _end_after_alarm(self) -> None:
        """End after an alarm, unless the main thread returns on its own."""
        diagnosis = self._diagnose()
        if not self._leaving.wait(INTERVALS_TO_UNWIND * self._settings.interval):
            self._end(diagnosis)

    def _end_without_progress(self) -> None:
        if self._heartbeat_thread is None:
            own = self._describe(0)
            who = name_ranks([self._rank], {self._rank: own})
            line = f"{who} has hung since {own.mark} ({own.seconds:.0f} s), in {own.place}"
            self._end(Diagnosis(line, fault=HUNG, culprit=who))
        else:
            self._end_after_alarm()

    def _is_termination_overdue(self) -> bool:
        """Whether SIGTERM is pending and the loop has not reached its next check in time."""
        if signal.SIGTERM not in signal.sigpending():
            return False
        mark = self._mark
        if self._sigterm is None or self._sigterm.mark is not mark:
            self._sigterm = _Termination(mark, time.monotonic(), self._first_heartbeats())
        seconds = time.monotonic() - self._sigterm.time
        return not mark.is_save and seconds > self._settings.termination_seconds

    def _is_overdue_without_launcher(self) -> bool:
        """Whether the store has ended with the launcher and the loop does not reach its next check in time.

        A run that is to go on without its launcher has until `timeout`, as with one.
        """
        thread, mark = self._heartbeat_thread, self._mark
        if thread is None or thread.lost_at is None or not thread.has_lost_launcher:
            return False
        if mark.is_save or self._settings.stop_with_launcher is False:
            return False
        usual = statistics.median(self._steps) if self._steps else 0.0
        limit = max(self._settings.termination_seconds, STEPS_WITHOUT_LAUNCHER * usual)
        return time.monotonic() - max(mark.time, thread.lost_at) > limit

    def _end_without_launcher(self) -> None:
        """End after the loss of the launcher's store, unless the loop goes on in the meantime."""
        mark, diagnosis = self._mark, self._diagnose()
        if self._leaving.wait(INTERVALS_TO_UNWIND * self._settings.interval):
            return
        if self._mark is mark:
            self._end(diagnosis)
        with self._diagnosis_lock:
            self._diagnosis = None  # it is of an earlier step

    def _first_heartbeats(self) -> dict[int, Heartbeat] | None:
        """All heartbeats on the one rank that will report the state of the ranks; None on the others."""
        if self._heartbeat_thread is None:
            return {}
        try:
            if not self._heartbeat_thread.execute(lambda store: store.claim(REPORTS_SIGTERM)):
                return None
            return self._heartbeat_thread.execute(lambda store: store.heartbeats())
        except StoreSilentError:
            return {}

    def _end_by_signal(self) -> None:
        assert self._sigterm is not None
        self._arm_backstop(ANSWERS_TO_END * self._settings.seconds_to_answer)
        since = f"no step has ended for {self._settings.termination_seconds:g} s"
        what = self._state_since(self._sigterm.heartbeats or {})
        if self._leaving.is_set() or self._mark is not self._sigterm.mark:
            faulthandler.cancel_dump_traceback_later()  # the loop went on in the meantime
            return
        error = TransientError(f"ended by SIGTERM without a checkpoint: {since}; {what}", fault=OVERDUE)
        error.is_reported = self._sigterm.heartbeats is None
        self._report(error)
        os._exit(EXIT_TERMINATED)

    def _state_since(self, first: dict[int, Heartbeat]) -> str:
        """The state of all ranks since a first reading, or of this rank alone if there was none."""
        own = describe_rank(self._rank, self._describe(0))
        if self._heartbeat_thread is None or not first:
            return own
        try:
            snapshot = self._heartbeat_thread.execute(lambda store: store.snapshot(first))
            return diagnose(snapshot, observer=self._rank).line
        except StoreSilentError:
            return own

    def _end(self, diagnosis: Diagnosis) -> None:
        # printing to a terminal or writing to a disk may hang as well
        self._arm_backstop(ANSWERS_TO_END * self._settings.seconds_to_answer)
        error = diagnosis.error()
        if isinstance(error, UserError):
            self._report(error)
        trace = trace_of_frame(sys._current_frames().get(self._main_thread))
        if not trace.is_waiting and self._folder is not None:
            # the line is already printed, so a full disk may be ignored here
            path = self._folder / f"stack-rank{self._rank}.txt"
            with suppress(OSError, UserError), open_regular(path, "w") as file:
                faulthandler.dump_traceback(file)
        if self._heartbeat_thread is not None:
            wait_for_readers(self._heartbeat_thread)
        os._exit(EXIT_CODES.get(diagnosis.kind, EXIT_TRANSIENT))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    line = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}".removesuffix(": ")
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"


def _kind_of(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPT
    if isinstance(error, TransientError):
        return LOSS
    return MISTAKE if isinstance(error, UserError) else DEFECT
