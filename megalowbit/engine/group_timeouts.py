"""One timeout for every process group of this process, whoever made it.

DeepSpeed makes its groups without one, so that a collective with a rank that is cut off the network would
wait for half an hour. torch sets the timeout of an existing group by a function of its own only, which is
held by a test of its interface. Not reached: transfers from one rank to one other over gloo (`send`,
`recv`), which keep what their group was made with; `engine.watchdog` ends a process that waits in one.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megalowbit import process_group

BACKENDS = frozenset({"gloo", "nccl"})  # torch can set no other's


def set_group_timeouts(timeout: timedelta) -> int:
    """Let collectives of all existing groups fail after `timeout`; local, harmless if called again.

    Groups made later have torch's default: call it again.

    Returns:
        How many groups were set.
    """
    if not process_group.is_initialized():
        return 0
    from torch.distributed import distributed_c10d

    groups = list(distributed_c10d._world.pg_map)
    found = [group for group in groups if BACKENDS & set(_backends(group))]
    for group in found:
        distributed_c10d._set_pg_timeout(timeout, group)
    return len(found)


def _backends(group: dist.ProcessGroup) -> list[str]:
    """`"cpu:gloo,cuda:nccl"` → gloo, nccl."""
    return [part.split(":")[-1] for part in dist.get_backend_config(group).split(",")]
