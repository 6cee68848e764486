"""One timeout for every process group of this process, whoever made it.

DeepSpeed makes its groups without one, so that a collective with a rank that is cut off the network would
wait for half an hour. torch has no public way to set the timeout of an existing group; what is used of its
inside is held by a test. Over gloo a collective that takes too long raises an error, which the watchdog makes
a diagnosis of. Over NCCL torch ends the process, with its own lines; beside a watchdog it is given longer,
for the diagnosis to come first. Not reached: transfers from one rank to one other over gloo (`send`,
`recv`), which keep what their group was made with; the watchdog ends a process that waits in one.
"""

from __future__ import annotations

from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist

from megalowbit.distributed import process_group

# timeouts beside a watchdog, in its own; torch can set no other backend's. A watchdog's diagnosis is printed
# 1.15 timeouts after the last mark, 1.41 if they are shorter than a minute; all must have ended at 1.5
TIMEOUT_FACTORS = MappingProxyType({"gloo": 1.0, "nccl": 1.4})


def timeout_of(backend: str, timeout: timedelta, *, is_watched: bool) -> timedelta | None:
    """What a group of this backend gets, beside a watchdog or without; None where none can be set."""
    if backend not in TIMEOUT_FACTORS:
        return None
    return timeout * (TIMEOUT_FACTORS[backend] if is_watched else 1.0)


def set_group_timeouts(timeout: timedelta, *, is_watched: bool = False) -> int:
    """Let collectives of all existing groups fail after `timeout`; returns how many groups were set.

    Local, harmless if called again, as is needed for groups made later. `is_watched`: a watchdog looks after
    this process as well.
    """
    if not process_group.is_initialized():
        return 0
    from torch.distributed import distributed_c10d

    groups = list(distributed_c10d._world.pg_map)
    return sum(_set_timeouts(group, timeout, is_watched) for group in groups)


def _set_timeouts(group: dist.ProcessGroup, timeout: timedelta, is_watched: bool) -> bool:
    """Set one group's, which may have a backend for each kind of device; False if it has none of ours."""
    names, is_set = _backends(group), False
    for device in group._device_types:
        seconds = timeout_of(names.get(device.type, ""), timeout, is_watched=is_watched)
        if seconds is not None:
            backend = group._get_backend(device)
            backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend._set_default_timeout(seconds)
            is_set = True
    return is_set


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """`"cpu:gloo,cuda:nccl"` → {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))
