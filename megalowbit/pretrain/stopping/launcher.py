"""Detects that this process's launcher has died, for example after `kill -9`, and makes the run save and end.

A launcher that ends normally ends its ranks. A killed launcher leaves them training, and nobody knows about
them when the job is started again. Once a second, this module compares the parent process with the one that
started this process: when a parent ends, the operating system assigns another. The `deepspeed` command starts
one launcher per node, so its process, the launcher's parent, is checked as well (on Linux). If either is
gone, this process sends itself SIGUSR1, and all ranks save after the same step.
Not detected: the end of a parent outside this container (its process id is 0).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

SECONDS_BETWEEN_CHECKS = 1.0
JOB_SCRIPT, TORCHRUN = "MEGALOWBIT_TRY", "TORCHELASTIC_RUN_ID"
DEEPSPEED = ("CROSS_RANK", "LOCAL_SIZE")
DEEPSPEED_PROGRAM, DEEPSPEED_MODULE = "deepspeed", "deepspeed.launcher.launch"


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher or a job script of this project started this process, rather than a shell."""
    environ = os.environ if environ is None else environ
    return JOB_SCRIPT in environ or TORCHRUN in environ or all(name in environ for name in DEEPSPEED)


class LauncherWatch:
    """Watches the launcher while the block runs; stop signals must be blocked in this process."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._launcher_of_parent = _deepspeed_above(self._parent)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megalowbit-launcher", daemon=True)

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has ended; checked at every call."""
        if os.getppid() != self._parent:
            return True
        expected = self._launcher_of_parent
        return expected is not None and _parent_of(self._parent) != expected

    def __enter__(self) -> LauncherWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN_CHECKS):
            if self.has_ended:
                os.kill(os.getpid(), signal.SIGUSR1)
                return


def _deepspeed_above(parent: int) -> int | None:
    """The id of the `deepspeed` process that started `parent`; None if `parent` is not its launcher."""
    if DEEPSPEED_MODULE not in _words_of(parent):
        return None
    above = _parent_of(parent)
    names = [Path(word).name for word in _words_of(above)[:2]] if above is not None else []
    return above if DEEPSPEED_PROGRAM in names else None


def _parent_of(process: int) -> int | None:
    try:
        # "12 (name) S 1 …": the name may contain spaces and parentheses, so split after the last ")"
        return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _words_of(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
