"""Messages between the ranks of a job: latency and bandwidth, and how far the hosts' clocks differ.

Real collectives of the job's backend, NCCL or gloo, on tensors as gradients are. All ranks take part in each
of them in the same order, so the number of repetitions must not depend on a rank's own clock: rank 0 decides
it, and the others follow.

Clocks: an all-reduce ends on no rank before the last one has entered it. If rank i enters it at a_i and
leaves it at e_i, by its own clock, the clock of i is ahead of rank 0's by at least a_i − e_0 and at most e_i
− a_0. The tightest bounds of several rounds are kept. This takes as many messages on 10,000 hosts as on two.

Pairs of hosts: in two rounds, the first rank of each host exchanges a tensor with that of the next and of the
one before. A host whose links are all slow is named. Not covered: links that only other pairs use.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import gather, share
from megalowbit.doctor.notices import Notice, note, problem, warning

SMALL_ROUNDS, CLOCK_ROUNDS = 50, 20
SIZES = (2**20, 2**24, 2**28)  # bytes of an all-reduce; the next one is tried after one within `ENOUGH`
ENOUGH = 0.0625  # seconds of an all-reduce, above which no larger one is measured
ROUNDS = 5
PAIR_BYTES, PAIR_ROUNDS = 2**24, 3
SLOW_NETWORK = 0.5  # of what is expected
SLOW_LINK = 0.5  # of the median, below which a host's links are slow
CLOCK_NOTE, CLOCK_PROBLEM = 0.1, 5.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Network:
    """Messages between all ranks.

    Attributes:
        backend: of torch.distributed.
        ranks, hosts: how many there are.
        latency: seconds of an all-reduce of 4 bytes, median.
        bytes: of the largest all-reduce that was measured.
        bandwidth: bytes/s that each rank sends and receives in it: 2·(n − 1)/n · bytes ÷ time (bus
            bandwidth).
        links: bytes/s of each host's slowest exchange with a neighbour, by host; empty with one host.
        clocks: seconds by which each host's clock is ahead of rank 0's, and how sure that is (±), by host.
    """

    backend: str
    ranks: int
    hosts: int
    latency: float
    bytes: int
    bandwidth: float
    links: dict[str, float]
    clocks: dict[str, tuple[float, float]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        clocks = {
            host: {"ahead_seconds": ahead, "uncertainty_seconds": sure}
            for host, (ahead, sure) in self.clocks.items()
        }
        return {**asdict(self), "clocks": clocks}


def measure_network(hosts: Sequence[str]) -> Network:
    """Measure; collective, a few seconds.

    Args:
        hosts: the host of each rank, in rank order.
    """
    device = process_group.exchange_device(None)
    leaders = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    leaders = dict(sorted(leaders.items(), key=lambda item: item[1]))
    latency = _latency(device)
    size, seconds = _largest(device)
    count = process_group.world_size()
    return Network(
        backend=dist.get_backend(),
        ranks=count,
        hosts=len(leaders),
        latency=latency,
        bytes=size,
        bandwidth=2 * (count - 1) / count * size / seconds,
        links=_links(leaders, device),
        clocks=_clocks(leaders, device),
    )


def _all_reduce(tensor: torch.Tensor) -> float:
    """Seconds of an all-reduce, until its result is there."""
    start = time.perf_counter()
    collectives.all_reduce(tensor)
    tensor[:1].cpu()  # waits for a GPU
    return time.perf_counter() - start


def _latency(device: torch.device) -> float:
    flag = torch.zeros(1, device=device)
    for _ in range(3):  # connections are made in the first one
        _all_reduce(flag)
    return median(_all_reduce(flag) for _ in range(SMALL_ROUNDS))


def _largest(device: torch.device) -> tuple[int, float]:
    """The largest size that was measured, and the seconds of an all-reduce of it."""
    size, seconds = SIZES[0], 0.0
    for size in SIZES:
        tensor = torch.zeros(size // 4, device=device)
        _all_reduce(tensor)
        seconds = min(_all_reduce(tensor) for _ in range(ROUNDS))
        if share(seconds > ENOUGH, 0):  # the next size takes up to 16 times as long, a second
            break
    return size, share(seconds, 0)


def _links(leaders: dict[str, int], device: torch.device) -> dict[str, float]:
    """Bytes/s of each host's slowest exchange with the host before and after it, between leaders."""
    ranks, names = list(leaders.values()), list(leaders)
    own = process_group.rank()
    place = ranks.index(own) if own in ranks else None
    tensor = torch.zeros(PAIR_BYTES, dtype=torch.uint8, device=device)
    slowest: float | None = None
    for first in (0, 1):  # pairs (0, 1), (2, 3) …, then (1, 2), (3, 4) …
        if len(ranks) > 1:
            collectives.barrier()
        if place is None or place < first:
            continue
        partner = place + 1 if (place - first) % 2 == 0 else place - 1
        if partner >= len(ranks):
            continue
        speed = _exchange(tensor, ranks[partner], is_first=place < partner)
        slowest = speed if slowest is None else min(slowest, speed)
    found = [speed for speed in gather(slowest) if speed is not None]
    return dict(zip(names, found, strict=True)) if len(names) > 1 else {}


def _exchange(tensor: torch.Tensor, other: int, *, is_first: bool) -> float:
    """Bytes/s of the best of a few exchanges with another rank, there and back."""
    best = float("inf")
    for _ in range(PAIR_ROUNDS + 1):  # the first one connects
        start = time.perf_counter()
        for is_sending in (is_first, not is_first):
            if is_sending:
                collectives.send(tensor, other)
            else:
                collectives.recv(tensor, other)
        tensor[:1].cpu()
        best = min(best, time.perf_counter() - start)
    return 2 * tensor.numel() / best


def _clocks(leaders: dict[str, int], device: torch.device) -> dict[str, tuple[float, float]]:
    """Seconds by which each host's clock is ahead of rank 0's, with their uncertainty."""
    flag, times = torch.zeros(1, device=device), []
    for _ in range(CLOCK_ROUNDS):
        entered = time.time()
        _all_reduce(flag)
        times.append((entered, time.time()))
    everyone = gather(times if process_group.rank() in leaders.values() else [])
    reference = everyone[0]
    found = {}
    for host, rank in leaders.items():
        pairs = list(zip(everyone[rank], reference, strict=True))
        least = max(entered - left_0 for (entered, _), (_, left_0) in pairs)
        most = min(left - entered_0 for (_, left), (entered_0, _) in pairs)
        found[host] = ((least + most) / 2, (most - least) / 2) if rank else (0.0, 0.0)
    return found


def check_bandwidth(network: Network, expected: float | None) -> Iterator[Notice]:
    """Whether NCCL reaches what the hardware should; `expected` is in bytes/s, None: unknown."""
    if network.backend == "nccl" and expected and network.bandwidth < SLOW_NETWORK * expected:
        yield warning(
            "network-slow",
            f"all-reduce of {network.bytes / 2**20:,.0f} MiB over {network.ranks} ranks passes "
            f"{network.bandwidth / 1e9:.3g} GB/s, and this hardware should reach some {expected / 1e9:.3g}",
            "NCCL_DEBUG=INFO shows which links are used (NVLink, InfiniBand or sockets)",
        )


def check_network(network: Network) -> Iterator[Notice]:
    """Hosts with slow links or another time."""
    if network.links:
        usual = median(network.links.values())
        for host, speed in network.links.items():
            if speed < SLOW_LINK * usual:
                yield warning(
                    "network-slow-host",
                    f"messages to and from neighbours at {speed / 1e9:.2f} GB/s, others at {usual / 1e9:.2f} "
                    "GB/s: every step waits for the slowest host",
                    "leave this host out, or check its cables and adapters",
                    [host],
                )
    for host, (ahead, sure) in network.clocks.items():
        least = abs(ahead) - sure
        if least > CLOCK_PROBLEM:
            make = problem
        elif least > CLOCK_NOTE:
            make = note
        else:
            continue
        yield make(
            "clock",
            f"the clock is {abs(ahead):.3g} s {'ahead of' if ahead > 0 else 'behind'} rank 0's (± {sure:.2g} "
            "s): times in logs, and of files on a shared disk, cannot be compared",
            "synchronise the hosts (chrony or ntpd)",
            [host],
        )
