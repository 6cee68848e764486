"""`attempts.jsonl`: when each attempt at a run began, and how it ended.

Exit codes and logs are often lost, and the folder of a run that was killed looks like that of one that still
trains. The main process therefore writes a line when its records are open, and one when it ends. An attempt
without the second line was killed, or its machine went down. Another rank writes a line only if it ends by
an error, to `attempts-rank<r>.jsonl`: the main process may be the one that was lost. Nothing of it is removed
when a run is resumed or rolled back.

Not covered: attempts that are rejected before their records are opened; nothing has happened in them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.durable_files import open_regular, sync
from megalowbit.errors import TransientError, UserError, file_system_error, shortened
from megalowbit.records.attempts import BEGUN, ENDED
from megalowbit.records.files import ATTEMPTS, RANK_ATTEMPTS

# how an attempt has ended
FINISHED, STOPPED, INTERRUPTED, USER_ERROR, TRANSIENT, DEFECT = (
    "finished", "stopped", "interrupted", "user error", "transient error", "error",
)  # fmt: skip
# of the job, as SLURM and the job script name them
VARIABLES = {"job": "SLURM_JOB_ID", "restart": "SLURM_RESTART_COUNT", "attempt": "MEGALOWBIT_TRY"}
LONGEST_LINE = 1000  # characters of an error


class AttemptRecord:
    """Records this attempt; as a context manager, how it ends.

    Args:
        folder: the run folder.
        identity: this process.

    Attributes:
        step: returns the number of steps trained so far; None: not known yet.
        has_begun: whether the records of the run were opened.
        is_stopped: whether training ended before its last step, on request.
        stopped_by: the signal that this process got then.
    """

    def __init__(self, folder: Path, identity: ProcessIdentity) -> None:
        self._folder, self._identity = folder, identity
        self._has_ended = False
        self.has_begun = False
        self.step: Callable[[], int | None] = lambda: None
        self.stopped_by: signal.Signals | None = None
        self.is_stopped = False

    def begin(self, *, is_resumed: bool, facts: Mapping[str, Any] | None = None) -> None:
        """Record the start, on the main process; from now on the end is recorded on every rank.

        Args:
            is_resumed: whether a checkpoint was loaded.
            facts: what else the line says, as plain values: see `records.page.attempt_facts`.

        Raises:
            UserError: the file cannot be written.
        """
        self.has_begun = True
        if not self._identity.is_main:
            return
        of_job = {name: os.environ[key] for name, key in VARIABLES.items() if key in os.environ}
        size = self._identity.world_size
        try:
            self._append(
                BEGUN,
                step=self.step(),
                is_resumed=is_resumed,
                processes=size,
                pid=os.getpid(),
                **of_job,
                **(facts or {}),
            )
        except OSError as error:
            raise file_system_error(
                f"{self._folder / ATTEMPTS} cannot be written ({error.strerror}): free space, or choose "
                "another --run-dir",
                error,
            ) from error

    def fail(self, error: BaseException) -> None:
        """Record an error that ends this attempt; a user error gets the folder, for its message."""
        is_of_another = isinstance(error, UserError) and (error.is_on_all_ranks or error.is_reported)
        if not self.has_begun or (is_of_another and not self._identity.is_main):
            return
        self.name_folder(error)
        self._end(how=_how(error), line=_line(error), error=type(error).__name__, **_fault(error))

    def name_folder(self, error: BaseException) -> None:
        """Give a user error the folder of the run that it has ended, for `diagnose_hint`."""
        if self.has_begun and isinstance(error, UserError):
            error.run_folder = self._folder

    def __enter__(self) -> AttemptRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        elif self.has_begun and self._identity.is_main:
            number = self.stopped_by
            more = {} if number is None else {"signal": number.name}
            self._end(how=STOPPED if self.is_stopped else FINISHED, **more)

    def _end(self, **facts: Any) -> None:
        """Record the end once: the watchdog may do it before the main thread."""
        if self._has_ended:
            return
        self._has_ended = True
        with suppress(OSError, UserError):  # a full disk may be what has ended the attempt
            self._append(ENDED, step=self.step(), **facts)

    def _append(self, event: str, **facts: Any) -> None:
        rank, is_main = self._identity.rank, self._identity.is_main
        path = self._folder / (ATTEMPTS if is_main else RANK_ATTEMPTS.replace("*", str(rank)))
        record = {"event": event, "time": round(time.time(), 3), "host": socket.gethostname(), "rank": rank}
        with open_regular(path, "a+") as file:
            end = "\n" if _is_torn(file) else ""  # a kill within a write must not cost the next line
            file.write(end + json.dumps({**record, **facts}) + "\n")
        sync(path)


def _is_torn(file: IO[str]) -> bool:
    """Whether a file has a last line without an end."""
    size = os.fstat(file.fileno()).st_size
    return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"


def _how(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, TransientError):
        return TRANSIENT
    return USER_ERROR if isinstance(error, UserError) else DEFECT


def _fault(error: BaseException) -> dict[str, str]:
    """What was at fault and who, of a transient error that says so."""
    if not isinstance(error, TransientError):
        return {}
    facts = {"fault": error.fault, "culprit": error.culprit}
    return {name: value for name, value in facts.items() if value is not None}


def _line(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()), LONGEST_LINE)
