"""The hook that advances a model's random stream, and looks whether the stream is this process's own.

Two processes under torch's DistributedDataParallel may have been given one rank (0 everywhere, or the local
rank on two nodes). Then averaging their gradients leaves the noise of rounding as it is. One process cannot
see the other's rank; but it knows its own in DDP's group and in the world, and a third number is a mistake.
Nothing is exchanged, since other ranks may not be in a forward. `LocalDDP` and `PrecisionController` compare
ranks when they are made. Not covered: FSDP, other engines, and compiled replicas, whose forward is traced.
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

    An object rather than a closure, so that deepcopy and pickle take the stream along. It also runs where
    nothing else of ours does, so it looks who trains the model: at the first forward, and where other hooks
    have come or gone since, as an engine's do.
    """

    layer_names: tuple[str, ...] = ()
    hooks_seen = 0

    def __init__(self, stream: RandomStream, layer_names: tuple[str, ...] = ()) -> None:
        self.stream = stream
        self.layer_names = layer_names

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Advance the stream, except where checkpointing repeats a forward."""
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
        """What copies and pickles take along: a copy is another engine's."""
        return {name: value for name, value in self.__dict__.items() if name != "hooks_seen"}


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
