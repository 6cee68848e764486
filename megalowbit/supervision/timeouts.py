"""Sets one timeout on every process group of this process, including DeepSpeed's.

DeepSpeed creates its groups without a timeout, so a collective with an unreachable rank would wait for half
an hour. torch has no public way to change the timeout of an existing group; a test checks the internals used
here.

When a collective takes too long, gloo raises an error, which the watchdog turns into a diagnosis. With NCCL,
torch ends the process and prints its own lines. If a watchdog runs, NCCL groups therefore get a longer
timeout, because the diagnosis must come first.

Not covered: point-to-point transfers over gloo (`send`, `recv`) keep the timeout their group was created
with. The watchdog ends a process that waits in one.
"""

from __future__ import annotations

from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist

from megalowbit.distributed import process_group

# backend → timeout as a multiple of the watchdog's; torch can set no other backend's. The watchdog prints its
# diagnosis 1.15 timeouts after the last mark (1.41 for timeouts below a minute), and all must end within 1.5
TIMEOUT_FACTORS = MappingProxyType({"gloo": 1.0, "nccl": 1.4})


def timeout_of(backend: str, timeout: timedelta, *, is_watched: bool) -> timedelta | None:
    """Timeout for a group of this backend, with or without a watchdog; None if it cannot be set."""
    if backend not in TIMEOUT_FACTORS:
        return None
    return timeout * (TIMEOUT_FACTORS[backend] if is_watched else 1.0)


def set_group_timeouts(timeout: timedelta, *, is_watched: bool = False) -> int:
    """Make collectives of all existing groups fail after `timeout`; returns the number of groups changed.

    Not collective. May be called again, as is needed for groups created later. Set `is_watched` if a watchdog
    supervises this process.
    """
    if not process_group.is_initialized():
        return 0
    from torch.distributed import distributed_c10d

    groups = list(distributed_c10d._world.pg_map)
    return sum(_set_timeouts(group, timeout, is_watched) for group in groups)


def _set_timeouts(group: dist.ProcessGroup, timeout: timedelta, is_watched: bool) -> bool:
    """Set the timeout of a group, for each of its devices' backends; False if none supports it."""
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
