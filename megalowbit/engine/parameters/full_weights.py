"""Gathers the weights of an engine's model as full tensors on rank 0, however they are partitioned.

At ZeRO stage 3 a rank has a piece of each parameter; under tensor parallelism it has a shard, which is joined
as described by its `sharding`. Parameters are gathered one at a time: no rank holds more than one full
parameter on its device, and rank 0 keeps copies on the host. Not covered: masters, which are in checkpoints.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megalowbit.distributed import process_group
from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.layers.state_dict_layout import parameter_layout, put_in_hf_layout
from megalowbit.layers.tensor_parallel.linear import tensor_group_of


def full_state_dict(engine: Any, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """`engine.module.state_dict()` with full tensors; every rank must call it.

    Returns:
        On rank 0 all parameters and persistent buffers, on the host, in the model's dtype and in the Hugging
        Face layout; tied parameters share memory. On other ranks an empty dictionary.
    """
    is_main = process_group.rank() == 0
    full: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor | None] = {}
    group = tensor_group_of(engine.module.modules())
    with parameter_layout(engine.module):  # shards and pieces are in the parameters' layout
        state = engine.module.state_dict(keep_vars=True)
    for name, value in state.items():
        is_frozen = isinstance(value, torch.nn.Parameter) and not value.requires_grad
        if not isinstance(value, torch.Tensor) or (exclude_frozen and is_frozen):
            continue
        if id(value) not in seen:
            with gathered(value):
                joined = _joined(value, group)
                seen[id(value)] = joined.to("cpu", copy=True) if is_main else None
        copy = seen[id(value)]
        if copy is not None:
            full[name] = copy
    put_in_hf_layout(engine.module, full)
    return {name: value.contiguous() for name, value in full.items()}


def _joined(value: torch.Tensor, group: TensorGroup | None) -> torch.Tensor:
    """The full tensor of a tensor-parallel shard (collective), or the tensor itself."""
    sharding = getattr(value, "sharding", None)
    value = value.detach()
    return value if sharding is None or group is None else sharding.join(group.gather(value))


def gathered(parameter: torch.Tensor) -> AbstractContextManager[Any]:
    """Context in which every rank has the full `parameter`; collective if it is partitioned (ZeRO 3)."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter])
    return context


def full_numel(parameter: torch.Tensor) -> int:
    """Number of elements of the full parameter, however it is partitioned and sharded."""
    sharding = getattr(parameter, "sharding", None)
    if sharding is None:
        return numel(parameter)
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return numel(parameter) * sum(sharding.parts) // int(shape[sharding.dim])


def numel(parameter: torch.Tensor) -> int:
    """Number of elements of this rank's shard, also if ZeRO 3 has partitioned it."""
    count: int = parameter.ds_numel if hasattr(parameter, "ds_id") else parameter.numel()  # type: ignore[attr-defined]
    return count
