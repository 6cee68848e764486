"""Binary files that are there wholly or not at all, and their checksums.

A file is written beside its place, flushed to disk and renamed; a crash at any moment leaves the old file or
the new one. No deepspeed here, so that tools can look at checkpoints without loading it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".incomplete"
READ_SIZE = 2**22  # bytes


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file beside `path`, flush it to disk and move it there; nothing is left after an error."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_SIZE):
            digest.update(piece)
    return digest.hexdigest()


def describe_write_error(path: str | Path, error: Exception) -> str:
    """One line: which file, why, what to do."""
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return f"{path}: {reason}; free space or choose another folder (earlier checkpoints are untouched)"
