"""Names locks that a killed build of a torch extension has left behind.

DeepSpeed compiles some of its operators on first use, with `torch.utils.cpp_extension`. A build creates a
file named `lock` in its folder and removes it at its end; other processes wait until the file is gone. If the
build is killed, the file stays, and every later start waits for it without a limit and without a word. The
file does not say who has created it, so only its age tells a build that runs from one that was killed.
Our own kernels (`c_library`) are renamed into place and need no lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

LOCK = "lock"
STALE_SECONDS = 1800.0  # DeepSpeed's longest operators take minutes to compile


def extension_folder() -> Path:
    """The folder of torch's extensions: `TORCH_EXTENSIONS_DIR`, or its default."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def stale_locks(folder: Path, *, now: float | None = None) -> list[tuple[Path, float]]:
    """Locks in a folder of extensions that are older than any build takes, with their age in seconds.

    A folder that cannot be read has none.
    """
    now = time.time() if now is None else now
    found = []
    # NAME/lock, or py312_cu128/NAME/lock in the default folder
    for lock in sorted([*folder.glob(f"*/{LOCK}"), *folder.glob(f"*/*/{LOCK}")]):
        try:
            age = now - lock.stat().st_mtime
        except OSError:  # removed meanwhile: that build has ended
            continue
        if lock.is_file() and age > STALE_SECONDS:
            found.append((lock, age))
    return found


def stale_lock_lines(*, never_built: Collection[str] = ()) -> list[str]:
    """A warning for each stale lock of the folder that torch uses.

    Args:
        never_built: names of extensions that this process does not build, so that their locks do no harm.
    """
    try:
        locks = stale_locks(extension_folder())
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return []
    return [
        f"{lock} is {age / 3600:.1f} hours old: a build of the extension {lock.parent.name} was probably "
        "killed, and each process that needs it waits for ever: remove the file if nothing is compiling"
        for lock, age in locks
        if lock.parent.name not in never_built
    ]
