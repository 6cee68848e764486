"""One process of each node works before the others, which then find its files in the cache.

Errors of one process are raised on all, so that none waits for a process that has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megalowbit.errors import TransientError, UserError

Result = TypeVar("Result")


def run_on_each_node_first(work: Callable[[], Result], fingerprint: Callable[[Result], str]) -> Result:
    """Run `work` on one process of each node, then on the others, which find the files in the cache.

    Collective if there is a process group; otherwise it only calls `work()`. If `work` fails on one rank, all
    ranks raise an error.

    Args:
        work: called exactly once in each process; must not call collectives.
        fingerprint: identifies a result; must be equal on all ranks.

    Raises:
        UserError: `work` raised a `UserError` on some rank, or the results of ranks differ.
        RuntimeError: `work` raised another error on another rank (that rank raises the original error).
    """
    from megalowbit.distributed.process_group import identify, is_initialized  # torch: see below

    if not is_initialized():
        return work()
    is_first = identify().local_rank == 0
    results: list[Result] = []
    for is_local_turn in (is_first, not is_first):
        failure: Exception | None = None
        if is_local_turn:
            try:
                results.append(work())
            except Exception as error:
                failure = error
        _raise_everywhere(failure)
    _compare_everywhere(fingerprint(results[0]))
    return results[0]


# The functions that use collectives import torch themselves: processes that only tokenise start without it.


def _raise_everywhere(failure: Exception | None) -> None:
    from megalowbit.distributed.agreement import gather
    from megalowbit.distributed.process_group import is_true_anywhere

    if not is_true_anywhere(failure is not None):
        return
    kinds = [kind for kind in (TransientError, UserError) if isinstance(failure, kind)]
    local = None if failure is None else ([kind.__name__ for kind in kinds], str(failure), repr(failure))
    of_all_ranks = gather(local)
    if failure is not None:
        raise failure
    for rank, failed in enumerate(of_all_ranks):
        if failed is not None:
            names, message, description = failed
            if names:  # exit codes of ranks agree if the types do
                raise TransientError(message) if TransientError.__name__ in names else UserError(message)
            raise RuntimeError(f"rank {rank} failed: {description}")


def _compare_everywhere(fingerprint: str) -> None:
    from megalowbit.distributed.agreement import gather

    of_all_ranks = gather(fingerprint)
    different = [rank for rank, other in enumerate(of_all_ranks) if other != of_all_ranks[0]]
    if different:
        rank = different[0]
        raise UserError(
            f"rank {rank} reads other data than rank 0 ({of_all_ranks[rank]} instead of {of_all_ranks[0]}): "
            "use the same corpus, tokenizer and Python version on all nodes"
        )
