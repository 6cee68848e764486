"""Sums the table by layer over ranks, which may have different layers.

The ranks first compare a fingerprint of their rows. Pipeline stages have different layers, and layers may run
first in different order. Only if fingerprints differ do ranks exchange all names, which is expensive for many
ranks. Then all arrange their numbers in the same order, and one all-reduce sums them. This takes a few small
messages. It is meant for the end of a run, or for every some hundred steps, not for each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import gather
from megalowbit.quantize.encoding import ERROR_NAMES
from megalowbit.telemetry.overflow.counters import TABLE_NAMES
from megalowbit.telemetry.overflow.exact_sum import NUM_DIGITS

Key = tuple[str, str]  # (layer, role)
Row = list[int]  # columns of TABLE_NAMES, then the digits of each of ERROR_NAMES
ROW_LENGTH = len(TABLE_NAMES) + len(ERROR_NAMES) * NUM_DIGITS


def sum_over_ranks(
    local: Mapping[Key, Row], group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[tuple[Key, Row]]:
    """Sum each row over the ranks of `group` (`None`: all), each of which must call it.

    `local` has this rank's rows in the order it saw them; `device` is that of its counts.
    """
    if process_group.world_size(group) == 1:
        yield from local.items()
        return
    device = process_group.exchange_device(group, device)
    keys = list(local) if _are_equal(list(local), group, device) else _keys_of_all_ranks(list(local), group)
    if not keys:
        return
    rows = [local.get(key, [0] * ROW_LENGTH) for key in keys]
    sums = torch.tensor(rows, dtype=torch.int64, device=device)
    collectives.all_reduce(sums, group=group)
    yield from zip(keys, sums.tolist(), strict=True)


def _are_equal(local: list[Key], group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether all ranks have the same keys in the same order."""
    digest = hashlib.blake2b(repr(local).encode(), digest_size=7).digest()
    fingerprint = int.from_bytes(digest, "little")
    both_ways = torch.tensor([fingerprint, -fingerprint], dtype=torch.int64, device=device)
    collectives.all_reduce(both_ways, op=dist.ReduceOp.MAX, group=group)
    largest, negative_smallest = both_ways.tolist()
    return bool(largest == -negative_smallest)


def _keys_of_all_ranks(local: list[Key], group: dist.ProcessGroup | None) -> list[Key]:
    """Union of all ranks' keys, in the order of the first rank that knows each; the same on every rank."""
    return list(dict.fromkeys(key for keys in gather(local, group) for key in keys))
