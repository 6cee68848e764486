"""Sums of the table by layer over ranks that may not have met the same layers.

The ranks first tell each other which rows they have (pipeline stages have different layers, and layers first
run in different order), then all lay their numbers out alike and one all-reduce each sums integers and
floats. It costs a few small messages: meant for the end of a run or every so many steps, never for each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from megalowbit import process_group
from megalowbit.telemetry.counters import ERROR_NAMES, TABLE_NAMES, OperandCounts

Key = tuple[str, str]  # (layer, role)
Row = tuple[list[int], list[float]]  # columns of TABLE_NAMES, columns of ERROR_NAMES


def sum_over_ranks(
    mine: Mapping[Key, Row], group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[tuple[Key, OperandCounts]]:
    """Sum each row over the ranks of `group`, each of which must call it.

    Args:
        mine: this rank's rows, in the order it met them.
        group: ranks to sum over; `None` for all.
        device: where this rank's counts live.
    """
    if process_group.world_size(group) == 1:
        for key, (integers, errors) in mine.items():
            yield key, OperandCounts.from_rows(integers, errors)
        return
    keys = _keys_of_all_ranks(list(mine), group)
    if not keys:
        return
    nothing = ([0] * len(TABLE_NAMES), [0.0] * len(ERROR_NAMES))
    rows = [mine.get(key, nothing) for key in keys]
    device = process_group.exchange_device(group, device)
    all_integers = torch.tensor([row[0] for row in rows], dtype=torch.int64, device=device)
    all_errors = torch.tensor([row[1] for row in rows], dtype=torch.float64, device=device)
    dist.all_reduce(all_integers, group=group)
    dist.all_reduce(all_errors, group=group)
    for key, integers, errors in zip(keys, all_integers.tolist(), all_errors.tolist(), strict=True):
        yield key, OperandCounts.from_rows(integers, errors)


def _keys_of_all_ranks(mine: list[Key], group: dist.ProcessGroup | None) -> list[Key]:
    """Union of all ranks' keys, in the order of the first rank that knows each; the same on every rank."""
    gathered: list[list[Key]] = [[] for _ in range(process_group.world_size(group))]
    dist.all_gather_object(gathered, mine, group=group)
    return list(dict.fromkeys(key for keys in gathered for key in keys))
