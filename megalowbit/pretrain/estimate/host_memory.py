"""The memory that processes of this host may use.

A batch system or a container limits a control group, and a group is also bound by the limits of those above
it. The kernel lists this process's groups in `/proc/self/cgroup`, one line for each hierarchy:

    0::/user.slice/job.scope          version 2: memory.max in /sys/fs/cgroup/…
    4:memory:/slurm/uid_1/job_2       version 1: memory.limit_in_bytes in /sys/fs/cgroup/memory/…

In a container the path may be the host's, of which only the container's group is visible, at the top.

Not covered: `memory.high`, which slows a process down; mounts elsewhere than below `/sys/fs/cgroup`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
LIMIT_2, LIMIT_1 = "memory.max", "memory.limit_in_bytes"


def host_memory() -> int:
    """Bytes of this host's memory, or of the lowest limit of this process's control groups."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([found, *_limits()])


def _limits() -> Iterator[int]:
    for file in _limit_files():
        with suppress(OSError, ValueError):  # no such file, or "max"
            yield int(file.read_text(encoding="ascii"))


def _limit_files() -> Iterator[Path]:
    """Files that may hold a limit: of this process's groups and of those above them."""
    lines: list[str] = []
    with suppress(OSError):  # no control groups, or another system
        lines = GROUPS.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (MOUNT / "memory", LIMIT_1) if controllers else (MOUNT, LIMIT_2)
        group = PurePosixPath(path.lstrip("/"))
        if ".." in group.parts:  # outside this process's name space
            group = PurePosixPath()
        yield from (root / each / name for each in (group, *group.parents))
