"""The weights of an engine's model as whole tensors on one rank, however they are partitioned.

At ZeRO stage 3 a rank has a piece of each parameter, under tensor parallelism a shard, which is joined as
its `cut` says. They are gathered one at a time, so that no rank ever holds more than one whole parameter on
its device; rank 0 keeps copies on the host. Not covered: masters, which are in the checkpoints.
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
    """`engine.module.state_dict()` with whole tensors; every rank must call it.

    Returns:
        On rank 0 all parameters and persistent buffers, on the host, in the precision they compute in and in
        the Hugging Face model's layout; tied ones share memory. On other ranks nothing.
    """
    is_main = process_group.rank() == 0
    whole: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor | None] = {}
    group = tensor_group_of(engine.module.modules())
    with parameter_layout(engine.module):  # cuts and partitions are of parameters as they are
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
            whole[name] = copy
    put_in_hf_layout(engine.module, whole)
    return {name: value.contiguous() for name, value in whole.items()}


def _joined(value: torch.Tensor, group: TensorGroup | None) -> torch.Tensor:
    """The whole of a tensor-parallel shard; collective where it is one."""
    sharding = getattr(value, "sharding", None)
    value = value.detach()
    return value if sharding is None or group is None else sharding.join(group.gather(value))


def gathered(parameter: torch.Tensor) -> AbstractContextManager[Any]:
    """Inside, `parameter` is whole on every rank; collective where it is partitioned (ZeRO stage 3)."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter])
    return context


def full_numel(parameter: torch.Tensor) -> int:
    """Elements of the whole parameter, however it is partitioned and cut."""
    sharding = getattr(parameter, "sharding", None)
    if sharding is None:
        return numel(parameter)
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return numel(parameter) * sum(sharding.parts) // int(shape[sharding.dim])


def numel(parameter: torch.Tensor) -> int:
    """Elements of this rank's shard, which a partitioned one does not have itself."""
    count: int = parameter.ds_numel if hasattr(parameter, "ds_id") else parameter.numel()  # type: ignore[attr-defined]
    return count
