"""Refuses a random stream of another rank's numbers under torch's DistributedDataParallel.

Two processes may have been given one rank (0 everywhere, or the local rank on two nodes). Then averaging
their gradients leaves the noise of rounding as it is. One process cannot see the other's rank; but it knows
its own in DDP's group and in the world, and a third number is a mistake. Nothing is exchanged, since other
ranks may not be in a forward. `LocalDDP` and `PrecisionController` compare ranks when they are made.
Not covered: FSDP, other engines, and compiled replicas, whose forward is traced.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megalowbit.errors import UserError
from megalowbit.quantize.random_stream import RandomStream


def check_replica(stream: RandomStream) -> None:
    """To be called in a forward.

    Raises:
        UserError: DDP runs it, and the rank that the stream was given is not this process's.
    """
    replica: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    if replica is None or stream.given_rank is None:
        return
    group = replica.process_group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size > 1 and stream.given_rank not in (rank, dist.get_rank()):
        raise UserError(
            f"rank = {stream.given_rank} was given to megalowbit.convert on rank {rank} of the {size} that "
            "DistributedDataParallel averages, so two of them would round with the same random numbers: "
            "leave rank= out"
        )
