"""Stop signals: SIGUSR1 (a time limit is near) and SIGTERM (the machine is going away).

Both make the run save and end. They are blocked, and the loop polls them once a step with `sigpending`. No
handler is installed: it would interrupt whatever is running, such as a socket or a compiler, and would miss
signals that arrive before it is installed. A blocked signal stays pending. Threads inherit the signal mask,
so it is set before libraries start threads.

Ctrl-C raises `KeyboardInterrupt` at once, except in code that must run to its end (`uninterrupted`), which
delays it. While the process starts, it may wait for other ranks in a library that does not return; then
`StartSignals` ends it. Not covered: threads started before the signals were blocked, and Windows.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from megalowbit.errors import EXIT_TRANSIENT

SECONDS_BETWEEN_CHECKS = 0.5
INTERRUPT_GRACE_SECONDS = 1.0  # how long the main thread may take to end after Ctrl-C
STOP_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGTERM})


def block_stop_signals() -> None:
    """Block stop signals, which `pending_stop_signal` then polls; call it before heavy imports.

    Threads and child processes started later inherit the signal mask.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def pending_stop_signal() -> signal.Signals | None:
    """The pending stop signal, if any; it stays pending, so later calls return it again."""
    waiting = signal.sigpending() & STOP_SIGNALS
    return signal.Signals(min(waiting)) if waiting else None


class StartSignals:
    """Context manager around work that does not poll for signals: a run's start, and what saves nothing.

    SIGTERM and the death of the launcher end the process at once. Ctrl-C raises `KeyboardInterrupt`. If the
    main thread is waiting in a library for other ranks, Python cannot raise it; the process then ends after
    `INTERRUPT_GRACE_SECONDS`. SIGUSR1 stays pending, and the run saves after its first step.
    """

    def __init__(
        self,
        *,
        is_main: bool = True,
        has_launcher_ended: Callable[[], bool] | None = None,
        before: str = "the first step",
        ending: frozenset[signal.Signals] = frozenset({signal.SIGTERM}),
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; polling starts when the block is entered.

        Args:
            is_main: whether this process prints that it was interrupted.
            has_launcher_ended: called twice a second; None: the launcher is not watched.
            before: what has not happened when a signal ends the process, in its line.
            ending: the stop signals that end the process.
            at_end: called before a signal ends the process.
        """
        self._before, self._ending, self._at_end = before, ending, at_end
        self._is_main, self._has_launcher_ended = is_main, has_launcher_ended or (lambda: False)
        self._is_over = threading.Event()
        self._reader, self._writer = os.pipe()
        self._writer_before: int | None = None
        self._thread = threading.Thread(target=self._watch, name="megalowbit-start", daemon=True)

    def __enter__(self) -> StartSignals:
        # Python handlers run in the main thread only; the wakeup fd receives the signal number at once
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self._writer, False)
            self._writer_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop polling: from now on the loop polls. Calling it again has no effect."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._writer_before is not None:
            signal.set_wakeup_fd(self._writer_before)
        os.close(self._writer)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            is_readable, _, _ = select.select([self._reader], [], [], SECONDS_BETWEEN_CHECKS)
            if self._is_over.is_set():  # the loop handles later signals
                break
            if is_readable and signal.SIGINT in os.read(self._reader, 4096):
                if not self._is_over.wait(INTERRUPT_GRACE_SECONDS):
                    self._at_end()
                    _end(f"interrupted before {self._before}" if self._is_main else "", 128 + signal.SIGINT)
            elif waiting := signal.sigpending() & self._ending:
                number = signal.Signals(min(waiting))
                self._at_end()
                _end(f"ended by {number.name} before {self._before}", 128 + number)
            elif self._has_launcher_ended():
                _end(f"ended before {self._before}: the launcher has ended", EXIT_TRANSIENT)
        os.close(self._reader)


def _end(line: str, code: int) -> NoReturn:
    if line:
        with suppress(OSError):  # the reader of stderr may have ended as well
            print(line, file=sys.stderr, flush=True)
    os._exit(code)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended; no effect outside the main thread, which alone receives it."""
    is_elsewhere = threading.current_thread() is not threading.main_thread()
    if is_elsewhere or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # ignored in background jobs
        yield
        return
    interrupts: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        interrupts.append(number)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt
