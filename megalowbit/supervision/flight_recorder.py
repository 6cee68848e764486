"""Writes torch's flight recorder, the last collectives of a rank, to a file before the process ends.

torch keeps the last `TORCH_FR_BUFFER_SIZE` collectives of each process: name, sizes, process group, state,
and the Python lines that issued them. Comparing the ranks' files shows which rank has not issued a
collective, or another one: `torchfrtrace FOLDER -p PREFIX`.

torch writes the file itself when an NCCL collective reaches its timeout. The watchdog ends the process
earlier, so it writes the same file under the same name, `TORCH_FR_DUMP_TEMP_FILE` followed by the rank.
Without that variable, which job scripts set, nothing is written. torch has no public function for this. Not
tested: records of NCCL groups, which need a torch with CUDA; those of gloo groups are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FILE_PREFIX = "TORCH_FR_DUMP_TEMP_FILE"


def record_prefix() -> str | None:
    """Path of the ranks' files without the rank at its end; None: no records are wanted."""
    return os.environ.get(FILE_PREFIX) or None


def write_record(prefix: str, rank: int, *, seconds: float) -> bool:
    """Write this process's record; returns whether it has been written.

    Args:
        prefix: path of the file without the rank at its end; missing folders are made.
        rank: of this process.
        seconds: the longest time to wait; reading the states of collectives or writing a file could hang too.
    """
    has_written = threading.Event()

    def write() -> None:
        with suppress(Exception):  # the process ends anyway, with its own message
            content = _dump()
            path, draft = Path(f"{prefix}{rank}"), Path(f"{prefix}{rank}.new")
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(content)
            draft.replace(path)  # a reader never sees a part of it
            has_written.set()

    threading.Thread(target=write, name="megalowbit-flight-recorder", daemon=True).start()
    return has_written.wait(seconds)


def _dump() -> bytes:
    """The record in torch's own format, a pickled dictionary."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as internals

    # NCCL groups have a recorder of their own
    name = "_dump_nccl_trace" if "nccl" in dist.get_backend_config() else "_dump_fr_trace"
    dump: Callable[[], bytes] = getattr(internals, name)
    return dump()
