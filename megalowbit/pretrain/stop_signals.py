"""Signals that ask a run to save and end: SIGUSR1 before a time limit, SIGTERM before a machine goes away.

Both are blocked and looked for once a step (`sigpending`), never handled: a handler would interrupt whatever
the process is in, a store's socket or a compiler, and one that is installed after the imports misses what
came during them. A blocked signal waits. Threads inherit the mask, so it is set before any library starts
its own.

Ctrl-C still raises `KeyboardInterrupt` at once, but for the parts of a program that must not end half-way
(`uninterrupted`): there it waits. Not covered: threads that were started before, and Windows.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS_BETWEEN_LOOKS = 0.5
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


class EndOnSigterm:
    """A thread that ends the process on SIGTERM while it starts, for no loop looks for the signal yet.

    SIGUSR1 goes on waiting: the run saves after its first step.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="megalowbit-start", daemon=True).start()

    def stop(self) -> None:
        """The loop looks for itself from now on."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN_LOOKS):
            if signal.SIGTERM in signal.sigpending():
                print("ended by SIGTERM before the first step", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)


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
