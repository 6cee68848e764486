"""The hosts of a job beside each other: what differs, and whether all see one run folder."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalowbit.distributed import process_group
from megalowbit.distributed.agreement import gather, share
from megalowbit.doctor.disk import Disk, is_shared, nearest_folder, not_writable
from megalowbit.doctor.machine import LOCAL_FACTS, Machine
from megalowbit.doctor.notices import Notice, merged, problem, warning

# facts whose difference is only a warning: results may differ in the last digit, or nothing does
HARMLESS = {"driver", "C compiler", "cpu", "cpu units", "system", *LOCAL_FACTS}
MARK = ".megalowbit-doctor-"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of the job.

    Attributes:
        machine: what it has.
        disk: the run folder's, seen from it.
        ranks: of the job, on it.
    """

    machine: Machine
    disk: Disk
    ranks: int

    @property
    def name(self) -> str:
        """Of the host."""
        return self.machine.host

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.machine.to_dict(), "ranks": self.ranks, "disk": self.disk.to_dict()}


def gather_hosts(machine: Machine, disk: Disk | None) -> list[Host]:
    """The hosts of the job in the order of their first rank, on every rank; collective.

    `disk` is given by one rank of each host.
    """
    found: dict[str, Host] = {}
    ranks: Counter[str] = Counter()
    for each, its_disk in gather((machine, disk)):
        ranks[each.host] += 1
        if its_disk is not None:
            found.setdefault(each.host, Host(machine=each, disk=its_disk, ranks=0))
    return [replace(host, ranks=ranks[name]) for name, host in found.items()]


def check_hosts(hosts: Sequence[Host]) -> list[Notice]:
    """What differs between hosts, with the hosts that differ from most."""
    return merged(
        [(host.name, found) for host in hosts for found in host.machine.notices], len(hosts)
    ) + list(_differences(hosts))


def _differences(hosts: Sequence[Host]) -> Iterator[Notice]:
    for name in hosts[0].machine.facts:
        values = {host.name: host.machine.facts[name] for host in hosts}
        usual, _ = Counter(values.values()).most_common(1)[0]
        others = {value: [host for host in values if values[host] == value] for value in values.values()}
        for value, where in others.items():
            if value == usual:
                continue
            make = warning if name in HARMLESS else problem
            reason = (
                "hosts should be alike"
                if name in HARMLESS
                else "a run starts only if this is equal on all ranks"
            )
            yield make("hosts-differ", f"{name} is {value}, on other hosts {usual}: {reason}", "", where)
    counts = Counter(host.ranks for host in hosts)
    if len(counts) > 1:
        usual_count = counts.most_common(1)[0][0]
        where = [host.name for host in hosts if host.ranks != usual_count]
        yield warning(
            "hosts-differ", f"another number of ranks than {usual_count}, as most hosts have", "", where
        )


def sees_marks(folder: Path) -> list[bool]:
    """Whether each rank sees a file that rank 0 writes into the run folder; collective.

    The file is empty and removed before this returns. Without room or rights to write it, all see nothing.
    """
    place = nearest_folder(folder)
    name = share(MARK + secrets.token_hex(8), 0)
    path, is_written = place / name, False
    if process_group.rank() == 0:
        with suppress(OSError):
            path.touch(exist_ok=False)
            is_written = True
    is_written = share(is_written, 0)  # and waits for it
    try:
        seen = gather(is_written and name in _names_in(place))
    finally:
        if process_group.rank() == 0:
            path.unlink(missing_ok=True)
    return seen


def _names_in(folder: Path) -> list[str]:
    """Names in a folder, by a listing: a network file system may cache that one of them is missing."""
    try:
        return [each.name for each in folder.iterdir()]
    except OSError:  # not readable here: nothing is seen
        return []


def check_folder(hosts: Sequence[Host], seen: Sequence[bool], rank_hosts: Sequence[str]) -> Iterator[Notice]:
    """Whether all hosts share the run folder: each rank of ZeRO writes its part of a checkpoint there."""
    if len(hosts) == 1:
        return
    if not seen[0]:
        if all(each.code != "disk-write" for each in hosts[0].machine.notices):  # its disk was not measured
            yield not_writable(hosts[0].disk.folder, "no file can be made and listed there", [hosts[0].name])
        return
    blind = dict.fromkeys(host for host, is_seen in zip(rank_hosts, seen, strict=True) if not is_seen)
    if blind:
        first = hosts[0]
        yield problem(
            "disk-not-shared",
            f"a file that {first.name} writes into {first.disk.folder} ({first.disk.file_system}) is not "
            "seen here: ranks would save parts of a checkpoint on the disks of their own hosts, and a "
            "resumed run would not find them",
            "name a folder on a shared file system with --run-dir",
            blind,
        )


def check_planned_folder(disk: Disk, hosts: int) -> Iterator[Notice]:
    """The same for a run on several hosts that is looked at from one."""
    if hosts > 1 and not is_shared(disk.file_system) and disk.file_system != "unknown":
        yield warning(
            "disk-not-shared",
            f"{disk.folder} is on {disk.file_system}, which looks like a disk of this host, and the run has "
            f"{hosts} hosts: every rank must see the run folder",
            "name a folder on a shared file system with --run-dir; as a job step on all hosts, doctor tries "
            "it",
        )
