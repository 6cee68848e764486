"""Signals that ask a run to save and end: SIGUSR1 before a time limit, SIGTERM before a machine goes away.

Both are blocked and looked for once a step (`sigpending`), never handled: a handler would interrupt whatever
the process is in, a store's socket or a compiler, and one that is installed after the imports misses what
came during them. A blocked signal waits. Threads inherit the mask, so it is set before any library starts
its own.

Ctrl-C still raises `KeyboardInterrupt` at once, but for the parts of a program that must not end half-way
(`uninterrupted`): there it waits. A start that waits for other ranks ends without it (`StartSignals`). Not
covered: threads that were started before, and Windows.
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
INTERRUPT_GRACE_SECONDS = 1.0  # for the main thread after Ctrl-C
STOP_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGTERM})


def block_stop_signals() -> None:
    """Let stop signals wait until `pending_stop_signal` is asked; call it before heavy imports.

    The mask of this thread is inherited by all it starts, and by child processes.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def pending_stop_signal() -> signal.Signals | None:
    """The stop signal that waits, if any; it goes on waiting, so every later call finds it too."""
    waiting = signal.sigpending() & STOP_SIGNALS
    return signal.Signals(min(waiting)) if waiting else None


def release_stop_signals() -> None:
    """Let stop signals end this process as they end any other; for work that nothing is saved of."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class StartSignals:
    """Ends the process while it starts, as a context around that: nothing looks for signals yet.

    SIGTERM ends it at once, and so does a launcher that has ended. Ctrl-C raises `KeyboardInterrupt` as
    always, but where the main thread waits in a library, for ranks that never come, it would be raised when
    the wait is over: after a moment the process ends without it. SIGUSR1 goes on waiting: the run saves after
    its first step.
    """

    def __init__(self, *, is_main: bool = True, has_launcher_ended: Callable[[], bool] | None = None) -> None:
        """Prepare; the block begins to look.

        Args:
            is_main: whether this process says that it was interrupted.
            has_launcher_ended: asked twice a second; None: nobody looks.
        """
        self._is_main, self._has_launcher_ended = is_main, has_launcher_ended or (lambda: False)
        self._is_over = threading.Event()
        self._reader, self._writer = os.pipe()
        self._writer_before: int | None = None
        self._thread = threading.Thread(target=self._watch, name="megalowbit-start", daemon=True)

    def __enter__(self) -> StartSignals:
        # a handler in Python waits for the main thread; the number of the signal is written here at once
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self._writer, False)
            self._writer_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """The loop looks for itself from now on; harmless if called again."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._writer_before is not None:
            signal.set_wakeup_fd(self._writer_before)
        os.close(self._writer)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            is_readable, _, _ = select.select([self._reader], [], [], SECONDS_BETWEEN_CHECKS)
            if self._is_over.is_set():  # what comes now is for the loop
                break
            if is_readable and signal.SIGINT in os.read(self._reader, 4096):
                if not self._is_over.wait(INTERRUPT_GRACE_SECONDS):
                    _end("interrupted before the first step" if self._is_main else "", 128 + signal.SIGINT)
            elif signal.SIGTERM in signal.sigpending():
                _end("ended by SIGTERM before the first step", 128 + signal.SIGTERM)
            elif self._has_launcher_ended():
                _end("ended before the first step, for the launcher has ended", EXIT_TRANSIENT)
        os.close(self._reader)


def _end(line: str, code: int) -> NoReturn:
    if line:
        with suppress(OSError):  # whoever read it may have ended as well
            print(line, file=sys.stderr, flush=True)
    os._exit(code)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the block has ended; then it raises. Only the main thread gets such signals."""
    is_elsewhere = threading.current_thread() is not threading.main_thread()
    if is_elsewhere or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
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
