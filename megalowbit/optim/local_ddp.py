"""Data parallelism like Megatron's local DDP: fp32 gradients, one buffer, one all-reduce a step.

Gradients are summed in fp32 over the micro-batches of a step. The loop averages them over the ranks once a
step, not at every backward, and without rounding sums to half precision as torch's DistributedDataParallel
does. The optimizers of this package find the `main_grad`s and use them directly.

Not covered: overlap of communication with backward, and sharding of gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.sharded_parameters import refuse_sharded_model
from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.instruments import Instruments
from megalowbit.values import require_module


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether a parameter is marked `allreduce = False`: an expert's, which other ranks do not hold."""
    return not getattr(parameter, "allreduce", True)


def _refuse_ranks_without_group() -> None:
    """Reject a launch of several ranks without a process group: each rank would train a separate model."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdecimal() and int(ranks) > 1 and not process_group.is_initialized():
        raise UserError(
            f"LocalDDP: WORLD_SIZE is {ranks}, but this process is in no process group and would train "
            "alone: call torch.distributed.init_process_group() first"
        )


class LocalDDP(torch.nn.Module):
    """A module whose replicas start with the same weights on all ranks and get the same gradients.

    ```
    model = LocalDDP(model.half())
    loss = model(batch)          # once a micro-batch, then backward
    model.allreduce_gradients()  # once a step, before optimizer.step()
    ```

    Parameters and buffers are broadcast from the group's first rank. Low-bit layers draw the random numbers
    of this process's rank in the group, unless `convert` was given another rank.

    Parameters marked `allreduce = False` (experts) belong to this rank: they are not broadcast. The tokens of
    all ranks have already contributed to their gradients, which are therefore only divided by the size of the
    group.

    Source: Megatron-LM's local class `DistributedDataParallel`.

    Args:
        module: on its final device, with parameters of their final dtype.
        data_parallel_group: ranks that hold replicas; default: all ranks, or this process only if no process
            group is initialised.
        instruments: those of the optimizer, which must be created before gradients are summed.

    Attributes:
        module: the inner module.

    Raises:
        UserError: parameters are on several devices or sharded by torch, two ranks would draw the same random
            numbers, or a launcher has started several ranks and torch.distributed is not initialised.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        data_parallel_group: dist.ProcessGroup | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        super().__init__()
        require_module(module, "LocalDDP")
        refuse_sharded_model("LocalDDP", module, "leave it out, because FSDP averages gradients itself")
        self.module = module
        self.data_parallel_group = data_parallel_group
        _refuse_ranks_without_group()
        self._world_size = process_group.world_size(data_parallel_group)
        self._set_data_ranks()
        if self._world_size > 1:
            self._broadcast()
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        factor_of = instruments.factor_of if instruments is not None else None
        shared = [parameter for parameter in trainable if not is_expert(parameter)]
        self._averaged = GradBuffer(shared, factor_of=factor_of)
        self._own = GradBuffer(filter(is_expert, trainable), factor_of=factor_of)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner module."""
        return self.module(*args, **kwargs)

    def zero_grad_buffer(self) -> None:
        """Set all `main_grad`s to zero; an optimizer of this package also does so after each step."""
        self._averaged.zero()
        self._own.zero()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  # torch's signature
        """The same as `zero_grad_buffer`; `module.zero_grad()` and `.grad = None` also clear gradients."""
        self.zero_grad_buffer()

    @torch.no_grad()
    def allreduce_gradients(self) -> None:
        """Average the gradients over the group: one collective, which every rank must call.

        A `.grad` that was cleared or set since the backward is respected. Afterwards every parameter has a
        `.grad`. An infinity or NaN on one rank reaches all ranks, so all of them skip the step.
        """
        if self._world_size == 1:
            return
        averaged, own = self._averaged.before_reduction(), self._own.before_reduction()
        for gradients in (averaged, own):
            gradients.mul_(1 / self._world_size)  # before the sum, like Megatron, so the sum cannot overflow
        if averaged.numel():  # an empty buffer may be on a device that the group cannot use
            collectives.all_reduce(averaged, op=dist.ReduceOp.SUM, group=self.data_parallel_group)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the inner module, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load into the inner module; then call `reload_model_params` of the optimizer for its masters."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _set_data_ranks(self) -> None:
        """Set the data-parallel rank of low-bit layers, and check that all ranks draw different numbers."""
        streams: dict[Any, None] = {}
        low_bit: list[Any] = [each for each in self.module.modules() if hasattr(each, "set_data_rank")]
        for layer in low_bit:
            if self.data_parallel_group is not None:
                layer.set_data_rank(process_group.rank(self.data_parallel_group), overrides=False)
            if layer.random_stream is not None:
                streams[layer.random_stream] = None
        device = next((parameter.device for parameter in self.module.parameters()), None)
        local = tuple((stream.seed, stream.rank) for stream in streams)
        process_group.check_numbers_differ(local or None, self.data_parallel_group, device)

    def _broadcast(self) -> None:
        group = self.data_parallel_group
        first = dist.get_global_rank(group, 0) if group is not None else 0
        for tensor in self._replicated():
            sent = tensor.detach().contiguous()
            collectives.broadcast(sent, src=first, group=group)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(sent)

    def _replicated(self) -> Iterator[torch.Tensor]:
        for parameter in self.module.parameters():
            if not is_expert(parameter):
                yield parameter
        yield from self.module.buffers()
