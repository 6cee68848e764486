"""Makes ranks agree on results and errors: an error ends every process with the same line, and none hangs.

- `agree`: rank 0 does work that could fail on one rank only (a folder, a checksum, a full disk) and
  broadcasts its result or error.
- `failing_together`: every rank does the work; if it fails on one rank, all ranks raise. `succeed_together`
  is the same for a single call.

Without a process group nothing is exchanged.
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
Raised = TypeVar("Raised", bound=UserError)


def agree(decide: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call `decide(*arguments, **named)` on rank 0 only and return its result on every rank; collective.

    The result must be picklable.

    Raises:
        UserError: `decide` raised one; every rank raises it with the same message.
        RuntimeError: `decide` raised another exception on rank 0; rank 0 itself raises the original.
    """
    if process_group.world_size() == 1:
        return decide(*arguments, **named)
    result: Any = None
    failure: Exception | None = None
    if process_group.rank() == 0:
        try:
            result = decide(*arguments, **named)
        except Exception as error:  # raised below, after the other ranks know
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
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A block that every rank runs; if it fails on one rank, all ranks raise.

    The end of the block is collective, its body is not.

    Args:
        group: of all ranks, for the messages; None: the world. See `process_group.group_of_hosts`.

    Raises:
        UserError: the block raised one on some rank; has that rank's message (the first's, if several) and
            names the rank, unless all ranks have the same message.
        RuntimeError: the block raised another exception on another rank; that rank raises the original.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # raised below, after the other ranks know
        failure = error
    of_all = failure if process_group.world_size() == 1 else _failure_of_all(failure, group)
    if of_all is failure and failure is not None:
        raise failure
    if of_all is not None:
        raise of_all from None  # it repeats this rank's own error


def succeed_together(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return `work(*arguments, **named)` on every rank, as the one statement of a `failing_together`."""
    with failing_together():
        return work(*arguments, **named)


def _failure_of_all(failure: Exception | None, group: dist.ProcessGroup | None) -> Exception | None:
    """The exception this rank must raise for its own or another rank's failure; None if no rank failed."""
    # one number; objects are exchanged only after a failure
    if not process_group.is_true_anywhere(failure is not None, group):
        return None
    everyone = gather(None if failure is None else (_kind(failure), _line(failure)), group)
    if failure is not None and not isinstance(failure, UserError):
        return failure
    rank, (kind, line) = next((rank, each) for rank, each in enumerate(everyone) if each is not None)
    message = line if set(everyone) == {everyone[rank]} else f"rank {rank}: {line}"
    return _error_of_all(kind, message)


def raised_on_all_ranks(message: str, *, is_transient: bool = False, fault: str | None = None) -> UserError:
    """An error that every rank raises; rank 0 alone prints it. `fault`: that of a transient error."""
    return of_all_ranks(TransientError(message, fault=fault) if is_transient else UserError(message))


def of_all_ranks(error: Raised) -> Raised:
    """The same error as one that every rank raises."""
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


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks of `group` (None: the world), in rank order; collective. For small values.

    Values must be picklable.
    """
    if process_group.world_size(group) == 1:
        return [value]
    from megalowbit.distributed import collectives

    found: list[Any] = [None] * process_group.world_size(group)
    collectives.all_gather_object(found, value, group)
    return found


def share(value: T, source: int) -> T:
    """The value of rank `source` on every rank; collective. The value must be picklable."""
    if process_group.world_size() == 1:
        return value
    from megalowbit.distributed import collectives

    holder = [value if process_group.rank() == source else None]
    collectives.broadcast_object_list(holder, source)
    shared: Any = holder[0]
    return shared


def gather_bytes(content: bytes) -> torch.Tensor:
    """(ranks, longest) uint8: one row for each rank's content, padded with zeros; collective.

    Unlike `gather`, it unpickles nothing. Used for data of all ranks that one rank saves.
    """
    import torch
    import torch.distributed as dist

    from megalowbit.distributed import collectives

    device = process_group.exchange_device(None)
    local = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    size = process_group.world_size()
    if size == 1:
        return local[None]
    longest = torch.tensor([len(local)], device=device)
    collectives.all_reduce(longest, op=dist.ReduceOp.MAX)
    filled = torch.cat([local, local.new_zeros(int(longest) - len(local))])
    everyone = local.new_zeros(size * len(filled))
    collectives.all_gather_single(everyone, filled)
    return everyone.view(size, len(filled)).cpu()
