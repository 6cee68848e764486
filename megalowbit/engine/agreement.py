"""One rank decides, all ranks know: so that a mistake ends every process with the same line, and none waits.

What touches the file system or may fail on one rank only (a folder, a checksum, a full disk) is done by rank
0; its result or its error is then broadcast. Without a process group everything is local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megalowbit import process_group
from megalowbit.errors import UserError

T = TypeVar("T")


def agree(decide: Callable[[], T]) -> T:
    """Run `decide` on rank 0 only and return its result on every rank; collective.

    Args:
        decide: called on rank 0; its result must be picklable.

    Raises:
        UserError: `decide` raised one; raised on every rank with the same message.
        RuntimeError: `decide` raised something else on rank 0, which itself raises the original.
    """
    if process_group.world_size() == 1:
        return decide()
    outcome: list[Any] = [None, None, None]  # result, message of a UserError, any other failure
    failure: Exception | None = None
    if process_group.rank() == 0:
        try:
            outcome[0] = decide()
        except UserError as error:
            outcome[1] = str(error)
        except Exception as error:  # must reach the other ranks before it goes on its way
            failure = error
            outcome[2] = f"rank 0 failed: {type(error).__name__}: {error}"
    import torch.distributed as dist

    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[2] is not None:
        raise RuntimeError(outcome[2])
    if outcome[1] is not None:
        raise UserError(outcome[1])
    result: T = outcome[0]
    return result
