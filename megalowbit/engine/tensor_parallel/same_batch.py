"""Checks that tensor-parallel ranks get the same first batch, instead of DeepSpeed's check.

DeepSpeed sends the full first batch to every tensor rank and fails with an assertion that does not name the
difference. Here digests are compared and the error names the argument. Not covered: later batches; arguments
other than tensors, plain values and collections of them; a user's mpu, for which DeepSpeed checks nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.distributed.agreement import gather
from megalowbit.errors import UserError

HANDLE = "first_dataloader_check"  # engine attribute with DeepSpeed's hook, which removes itself


def check_first_batch(engine: Any) -> None:
    """Make a new engine's first forward compare its batch over DeepSpeed's tensor-parallel ranks, if any."""
    theirs = getattr(engine, HANDLE, None)
    if theirs is None:
        return
    theirs.remove()
    group = engine.mpu.get_tensor_model_parallel_group()

    def check(_: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        check_same_batch({**{str(place): each for place, each in enumerate(positional)}, **named}, group)
        getattr(engine, HANDLE).remove()

    setattr(engine, HANDLE, engine.module.register_forward_pre_hook(check, prepend=True, with_kwargs=True))


def check_same_batch(arguments: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Reject arguments of forward that differ between the ranks of a group; collective over the group.

    Raises:
        UserError: on all ranks of the group; names the first argument that differs.
    """
    digests = {name: _digest(value) for name, value in arguments.items()}
    everyone = gather(digests, group)
    for name in dict.fromkeys(name for each in everyone for name in each):
        if len({each.get(name) for each in everyone}) > 1:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
            raise UserError(
                f"tensor-parallel ranks {ranks} got different batches (argument {name} of forward): "
                "choose the data by engine.process_grid.data_rank, which these ranks share, not by the rank"
            )


def _digest(value: object) -> str:
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: object) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)};".encode()
        flat = value.detach().cpu().contiguous().view(-1)
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield f"{key}:".encode()
            yield from _parts(each)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} ".encode()
        for each in value:
            yield from _parts(each)
    elif value is None or isinstance(value, bool | int | float | str):
        yield f"{value!r};".encode()
