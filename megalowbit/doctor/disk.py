"""The disk of the run folder: its file system, free room and bandwidth.

One file without a name is written with `fsync`, read back and gone, whatever happens: its name is removed
before the first byte is written. Pages are dropped from the cache before they are read, as far as the system
does so. Nothing is created if the folder does not exist yet: the nearest folder above it is measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalowbit.doctor.notices import Notice, problem, warning

CHUNK = 16 * 2**20
SECONDS = 2.0  # for writing, and again for reading
MOST_BYTES = 2**30
SHARE_OF_ROOM = 0.1  # of the free room, at most
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "afs", "fuse", "weka", "panfs", "9p")
SLOW = 100e6  # bytes/s of one host, below which a checkpoint takes long


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The file system of a folder, as measured.

    Attributes:
        folder: which was measured.
        file_system: its kind.
        free: bytes that this user may write.
        write, read: bytes/s; None: not measured.
    """

    folder: str
    file_system: str
    free: int
    write: float | None = None
    read: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "is_shared": is_shared(self.file_system)}


def nearest_folder(path: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    path = path.expanduser().absolute()
    return next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))


def file_system_of(path: Path) -> str:
    """Kind of the file system that holds a path, by /proc/self/mounts; `unknown` without that file."""
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        path = path.resolve()
    except OSError:
        return kind
    for line in lines:
        _, point, found = (each.replace("\\040", " ") for each in line.split()[:3])
        is_above = path == Path(point) or Path(point) in path.parents
        if is_above and len(point) >= len(best):
            best, kind = point, found
    return kind


def is_shared(file_system: str) -> bool:
    """Whether it is one that several hosts usually share."""
    return file_system.startswith(SHARED)


def measure_disk(folder: Path, *, is_measured: bool = True) -> tuple[Disk, list[Notice]]:
    """The disk of a run folder, and what is wrong with it.

    Args:
        folder: need not exist.
        is_measured: whether to write and read; takes up to 2 × `SECONDS` and the time to flush what was
            written.
    """
    place = nearest_folder(folder)
    status = os.statvfs(place)
    disk = Disk(folder=str(place), file_system=file_system_of(place), free=status.f_bavail * status.f_frsize)
    if not is_measured:
        return disk, []
    try:
        write, read = _speeds(place, disk.free)
    except OSError as error:
        return disk, [not_writable(str(place), str(error.strerror))]
    disk = Disk(folder=disk.folder, file_system=disk.file_system, free=disk.free, write=write, read=read)
    return disk, list(_check(disk))


def not_writable(folder: str, reason: str, hosts: Iterable[str] = ()) -> Notice:
    """The notice about a folder that no run could save to; `hosts` see it, none: all do."""
    text = f"{folder} cannot be written to ({reason}): no run could save there"
    return problem("disk-write", text, "name a folder of yours with --run-dir", hosts)


def _check(disk: Disk) -> Iterator[Notice]:
    if disk.write is not None and disk.write < SLOW:
        yield warning(
            "disk-slow",
            f"{disk.folder} ({disk.file_system}) takes {disk.write / 1e6:.0f} MB/s from this host: training "
            "stops for each checkpoint until it is written",
            "name a faster file system with --run-dir",
        )


def _speeds(folder: Path, free: int) -> tuple[float, float]:
    """Bytes/s of writing, flushed to the disk, and of reading."""
    most = max(CHUNK, min(MOST_BYTES, int(free * SHARE_OF_ROOM)) // CHUNK * CHUNK)
    data = os.urandom(CHUNK)  # not compressible
    with tempfile.TemporaryFile(dir=folder, prefix=".megalowbit-doctor-", buffering=0) as file:
        written, start = 0, time.perf_counter()
        while written < most and time.perf_counter() - start < SECONDS:
            written += file.write(data)
        os.fsync(file.fileno())
        write = written / (time.perf_counter() - start)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < SECONDS and (found := file.read(CHUNK)):
            count += len(found)
        return write, count / max(time.perf_counter() - start, 1e-9)
