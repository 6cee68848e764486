"""The hook that advances a model's random stream, and checks that each process has its own stream.

Under torch's DistributedDataParallel, two processes may have been given the same rank (0 everywhere, or the
local rank on two nodes). Their rounding errors are then equal, and averaging gradients does not reduce them.
A process cannot see the rank given to another one. But it knows its own rank in DDP's group and in the world,
and any other number is a mistake. Nothing is exchanged, because other ranks may not be in a forward.
`LocalDDP` and `PrecisionController` compare ranks when they are created.

Not covered: a rank given under FSDP or another engine, and compiled replicas, whose forward is traced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megalowbit.errors import UserError
from megalowbit.layers.compiled import advance
from megalowbit.layers.conversion.other_loops import check_engine
from megalowbit.layers.matmul.use_counter import is_recomputing
from megalowbit.quantize.random_stream import RandomStream


class AdvanceStream:
    """Forward pre-hook: each training forward is one micro-batch.

    A class and not a closure, so deepcopy and pickle include the stream. Often it is the only megalowbit code
    in a training loop, so it also checks which engine trains the model: at the first forward, and whenever
    other hooks were added or removed since, as engines do.
    """

    layer_names: tuple[str, ...] = ()
    hooks_seen = 0

    def __init__(self, stream: RandomStream, layer_names: tuple[str, ...] = ()) -> None:
        self.stream = stream  # by this attribute layers find the hook
        stream.finish(stream.step)  # also a call of a part of the model begins with micro-batch 1
        self.layer_names = layer_names

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Advance the stream, unless checkpointing repeats a forward."""
        del args
        if not module.training:
            return
        if torch.compiler.is_compiling():
            advance(self.stream.step_tensor)
        elif not is_recomputing():
            check_replica(self.stream)
            if len(module._forward_pre_hooks) != self.hooks_seen:
                check_engine(module, self.layer_names)
                self.hooks_seen = len(module._forward_pre_hooks)
            self.stream.advance()

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles; a copy may get another engine, so it checks again."""
        return {name: value for name, value in self.__dict__.items() if name != "hooks_seen"}


def check_replica(stream: RandomStream) -> None:
    """Check the stream's rank within a forward.

    Raises:
        UserError: DDP runs the forward, and the stream was given a rank that is not this process's.
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
