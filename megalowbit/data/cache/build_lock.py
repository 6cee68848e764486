"""The lock that lets one process build a cached file while others wait, also on other nodes.

It is `flock`, which NFS and Lustre support between nodes, on a file next to the one to build. The kernel
releases it when a process ends, however that happens.

The lock's file is removed after the build. A process that has opened it before would lock a file without a
name, while another one locks a new file of that name, and both would build. Two rules prevent this: the file
is removed before its lock is released, and a process that gets the lock builds only if the file still has its
name.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megalowbit.errors import TransientError

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_TRIES = 0.5
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextmanager
def build_lock(path: Path, timeout: float) -> Iterator[bool]:
    """Wait until this process alone may build `path`, and hold the lock meanwhile.

    Yields whether there is a lock: False if the file system has none.

    Raises:
        TransientError: another process still holds it after `timeout` seconds.
    """
    lock = _acquire(path, timeout)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            # before it is released, so that nobody gets the lock of a file that has lost its name
            _lock_of(path).unlink(missing_ok=True)
            lock.close()


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _acquire(path: Path, timeout: float) -> IO[str] | None:
    """The locked file, whose lock is held until it is closed; None if the file system has no locks."""
    lock, end, is_logged = _lock_of(path), time.monotonic() + timeout, False
    while True:
        file = lock.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno in NO_LOCKS:
                logger.warning("%s has no file locks: processes that need it may all build %s", lock, path)
                return None
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if time.monotonic() >= end:
                raise TransientError(
                    f"{path} is still being built by {_holder(lock)} after {timeout:g} s: raise "
                    "data.build_timeout, or build it beforehand with --prepare-data"
                ) from None
            if not is_logged:
                logger.info("waiting for %s, which %s builds, for at most %g s", path, _holder(lock), timeout)
                is_logged = True
            time.sleep(min(SECONDS_BETWEEN_TRIES, max(0.0, end - time.monotonic())))
            continue
        if _is_same(file, lock):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            return file
        file.close()  # its owner has removed it since it was opened


def _holder(lock: Path) -> str:
    try:
        return lock.read_text(encoding="utf-8") or "another process"
    except OSError:  # just removed
        return "another process"


def _is_same(file: IO[str], path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(file.fileno())
    return (own.st_ino, own.st_dev) == (found.st_ino, found.st_dev)
