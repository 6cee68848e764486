"""Tensor-parallel ranks must get the same batch: checked at the first one, in place of DeepSpeed's check.

DeepSpeed sends the whole first batch to every tensor rank and ends in an assertion that does not say what
differs; here digests are compared and the argument is named. Not covered: later batches, arguments other than
tensors, plain values and collections of them; an mpu of the user's own, for which DeepSpeed checks nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.distributed.agreement import gather
from megalowbit.errors import UserError

HANDLE = "first_dataloader_check"  # DeepSpeed's, of a hook that removes itself


def check_first_batch(engine: Any) -> None:
    """Let a new engine's first forward compare its batch over DeepSpeed's tensor-parallel ranks, if any."""
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
    """Refuse arguments of forward that are not the same on all ranks of a group; collective over it.

    Raises:
        UserError: on all of these ranks; names the first argument that differs.
    """
    mine = {name: _digest(value) for name, value in arguments.items()}
    everyone = gather(mine, group)
    for name in dict.fromkeys(name for each in everyone for name in each):
        if len({each.get(name) for each in everyone}) > 1:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
            raise UserError(
                f"tensor-parallel ranks {ranks} got different batches (argument {name} of forward): "
                "let data follow engine.process_grid.data_rank, which these ranks share, and not the rank"
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
