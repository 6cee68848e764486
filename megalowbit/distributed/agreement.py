"""One rank decides, all ranks know: so that a mistake ends every process with the same line, and none waits.

What touches the file system or may fail on one rank only (a folder, a checksum, a full disk) is done by rank
0; its result or its error is then broadcast (`agree`). What every rank must do for itself ends on all ranks
where it fails on one (`failing_together`; `succeed_together` is the same for a single call). Without a
process group everything is local.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from megalowbit.distributed import process_group
from megalowbit.errors import TransientError, UserError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")


def agree(decide: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call `decide(*arguments, **named)` on rank 0 only and return its result on every rank; collective.

    The result must be picklable.

    Raises:
        UserError: `decide` raised one; raised on every rank with the same message.
        RuntimeError: `decide` raised something else on rank 0, which itself raises the original.
    """
    if process_group.world_size() == 1:
        return decide(*arguments, **named)
    result: Any = None
    failure: Exception | None = None
    if process_group.rank() == 0:
        try:
            result = decide(*arguments, **named)
        except Exception as error:  # must reach the other ranks before it goes on its way
            failure = error
    shared, reason = share((result, None if failure is None else (_kind(failure), _line(failure))), 0)
    if failure is not None and not isinstance(failure, UserError):
        raise failure
    if reason is not None:
        kind, line = reason
        raise _error_of_all(kind, f"rank 0 failed: {line}" if kind == "defect" else line)
    found: T = shared
    return found


@contextmanager
def failing_together() -> Iterator[None]:
    """A block that every rank runs; where it fails on any, all raise. Its end is collective, its body is not.

    Raises:
        UserError: the block raised one on some rank; the first such rank's message, naming the rank unless
            all say the same.
        RuntimeError: it raised something else elsewhere; the rank itself raises the original.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # must reach the other ranks before it goes on its way
        failure = error
    of_all = failure if process_group.world_size() == 1 else _failure_of_all(failure)
    if of_all is failure and failure is not None:
        raise failure
    if of_all is not None:
        raise of_all from None  # a rank's own mistake is repeated in it


def succeed_together(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return `work(*arguments, **named)` on every rank, as the one statement of a `failing_together`."""
    with failing_together():
        return work(*arguments, **named)


def _failure_of_all(failure: Exception | None) -> Exception | None:
    """What this rank must raise for its own failure or another rank's; None where no rank failed."""
    if not process_group.is_true_anywhere(failure is not None):  # one number; objects only of failures
        return None
    everyone = gather(None if failure is None else (_kind(failure), _line(failure)))
    if failure is not None and not isinstance(failure, UserError):
        return failure
    rank, (kind, line) = next((rank, each) for rank, each in enumerate(everyone) if each is not None)
    message = line if set(everyone) == {everyone[rank]} else f"rank {rank}: {line}"
    return _error_of_all(kind, message)


def raised_on_all_ranks(message: str, *, is_transient: bool = False) -> UserError:
    """An error that every rank raises alike, so that one of them is enough to print it."""
    error = (TransientError if is_transient else UserError)(message)
    error.is_on_all_ranks = True
    return error


def _error_of_all(kind: str, message: str) -> Exception:
    if kind == "defect":
        return RuntimeError(message)
    return raised_on_all_ranks(message, is_transient=kind == "transient")


def _kind(error: Exception) -> str:
    if not isinstance(error, UserError):
        return "defect"
    return "transient" if isinstance(error, TransientError) else "mistake"


def _line(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def gather(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank of a group has (None: of all), by rank; collective. Small picklable values."""
    if process_group.world_size(group) == 1:
        return [mine]
    import torch.distributed as dist

    found: list[Any] = [None] * process_group.world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def share(value: T, source: int) -> T:
    """What rank `source` has, on every rank; collective. Picklable."""
    if process_group.world_size() == 1:
        return value
    import torch.distributed as dist

    holder = [value if process_group.rank() == source else None]
    dist.broadcast_object_list(holder, src=source)
    shared: Any = holder[0]
    return shared


def gather_bytes(mine: bytes) -> torch.Tensor:
    """(ranks, longest) uint8, what every rank has in its row, filled up with zeros; collective.

    Unlike `gather` it unpickles nothing: for what one rank saves of all.
    """
    import torch
    import torch.distributed as dist

    device = process_group.exchange_device(None)
    local = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    size = process_group.world_size()
    if size == 1:
        return local[None]
    longest = torch.tensor([len(local)], device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    filled = torch.cat([local, local.new_zeros(int(longest) - len(local))])
    everyone = local.new_zeros(size * len(filled))
    dist.all_gather_single(everyone, filled)
    return everyone.view(size, len(filled)).cpu()
