"""What ranks write for each other beside their collectives, in the store that the process group began with.

Every rank keeps one entry, its heartbeat. Beyond that a run that goes well writes nothing. When something has
failed there are a few entries more: that there is an alarm, which rank diagnoses it (the first that claims
it), a rank's own report of its failure, and the diagnosis, which all others read; so one rank asks and one
speaks, however many there are. All calls go through a connection of its own (a clone), since the group's may
be waiting; they block while the network is cut, so a thread makes them that nobody waits for. Values are
JSON.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

ALARM, FAILURE, DIAGNOSIS, READERS, ENTERED = "alarm", "failure", "diagnosis", "informed", "entered"
DIAGNOSES, REPORTS_SIGTERM = "diagnoses", "reports SIGTERM"  # what one rank alone does
IS_STORE_OF_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"
# a mistake is found again by the next try, an interrupt was asked for, and the rest may have gone
KINDS = DEFECT, MISTAKE, INTERRUPT, LOSS = "defect", "mistake", "interrupt", "loss"
KEYS_A_REQUEST = 256
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank says of itself, a few times per timeout.

    Attributes:
        count: grows with every heartbeat; a rank is silent where it does not.
        mark: what its training loop is at: `"step 7"`, `"the save of step 7"`.
        seconds: since it began with that.
        place: where its main thread is.
        is_waiting: in a collective, for other ranks.
        is_done: it has left training as it should.
        host: name of its machine.
    """

    count: int
    mark: str
    seconds: float
    place: str
    is_waiting: bool
    is_done: bool = False
    host: str

    def to_text(self) -> str:
        """As a store keeps it, in JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Heartbeat:
        return cls(**json.loads(text))


class HeartbeatSnapshot(NamedTuple):
    """Heartbeats of all ranks, read twice, a few intervals apart; ranks that never gave one are missing."""

    first: Mapping[int, Heartbeat]
    second: Mapping[int, Heartbeat]
    world_size: int

    @property
    def silent(self) -> list[int]:
        """Ranks that have said nothing new."""
        return [rank for rank in range(self.world_size) if not self._has_answered(rank)]

    @property
    def alive(self) -> list[int]:
        """Ranks that have."""
        return [rank for rank in range(self.world_size) if self._has_answered(rank)]

    def _has_answered(self, rank: int) -> bool:
        now, before = self.second.get(rank), self.first.get(rank)
        return now is not None and (now.is_done or before is None or now.count > before.count)

    def is_stuck(self, rank: int) -> bool:
        """Whether its main thread was at the same place both times."""
        before, now = self.first.get(rank), self.second[rank]
        return before is not None and (before.place, before.mark) == (now.place, now.mark)


class FailureReport(NamedTuple):
    """A rank's own account of why it ends: what its loop was at, and what it raised."""

    rank: int
    host: str
    mark: str
    line: str
    kind: str  # one of `KINDS`

    def __str__(self) -> str:
        where = " (its own output says where)" if self.kind == DEFECT else ""
        return f"rank {self.rank} (host {self.host}) failed in {self.mark}: {self.line}{where}"


class PublishedDiagnosis(NamedTuple):
    """What the rank that diagnosed has found, on a line for people."""

    line: str
    kind: str  # one of `KINDS`
    num_alive: int  # ranks that are expected to read it, this one among them


class StoreAddress(NamedTuple):
    """Where the store is served.

    Attributes:
        host: as the ranks were given it.
        number: the same as an address, since names cannot be looked up where the network is cut.
        port: of TCP.
        is_main_process: or else the launcher.
    """

    host: str
    number: str
    port: int
    is_main_process: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class HeartbeatStore:
    """The entries of one training loop; every method is one or a few requests to the store."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Open a connection; needs a process group, and all `world_size` ranks to come by as often."""
        from torch.distributed import distributed_c10d

        store = distributed_c10d._get_default_store()
        self.address = _address(store)
        clone = store.clone()  # type: ignore[attr-defined]
        own = dist.PrefixStore(f"megalowbit-watchdog/{os.environ.get(ATTEMPT, '0')}", clone)
        # loops of one process follow each other: what the first has left must not alarm the second
        loop = (own.add(ENTERED, 1) - 1) // world_size
        self._store = dist.PrefixStore(f"{loop}", own)
        self._rank, self._world_size = rank, world_size

    @property
    def is_hosted_here(self) -> bool:
        """Whether the entries end with this process."""
        return self._rank == 0 and (self.address is None or self.address.is_main_process)

    def publish(self, heartbeat: Heartbeat) -> None:
        self._store.set(_key_of(self._rank), heartbeat.to_text())

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Of all ranks that have given one."""
        ranks = [
            rank
            for start in range(0, self._world_size, KEYS_A_REQUEST)
            for rank in self._present(range(start, min(start + KEYS_A_REQUEST, self._world_size)))
        ]
        texts = self._store.multi_get([_key_of(rank) for rank in ranks]) if ranks else []
        return {rank: Heartbeat.from_text(text) for rank, text in zip(ranks, texts, strict=True)}

    def _present(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of some ranks that have given a heartbeat: one request if all have."""
        if self._store.check([_key_of(rank) for rank in ranks]):
            return ranks
        return [rank for rank in ranks if self._store.check([_key_of(rank)])]

    def snapshot(self, first: Mapping[int, Heartbeat]) -> HeartbeatSnapshot:
        """An earlier reading of heartbeats beside one of now."""
        return HeartbeatSnapshot(first, self.heartbeats(), self._world_size)

    def raise_alarm(self) -> None:
        """Let every rank know that there is something to read."""
        self._store.set(ALARM, "1")

    def is_alarmed(self) -> bool:
        return self._has(ALARM)

    def claim(self, what: str) -> bool:
        """Become the rank that does something for all; False if another is."""
        return int(self._store.compare_set(what, "", str(self._rank))) == self._rank

    def claimed_by(self, what: str) -> int | None:
        """The rank that does it, if any."""
        return int(self._store.get(what)) if self._has(what) else None

    def report(self, failure: FailureReport) -> None:
        """Leave a failure to be found, unless there is one already, and raise the alarm."""
        self._store.compare_set(FAILURE, "", json.dumps(failure))
        self._store.add(READERS, 1)
        self.raise_alarm()

    def failure(self) -> FailureReport | None:
        return FailureReport(*self._read(FAILURE)) if self._has(FAILURE) else None

    def publish_diagnosis(self, diagnosis: PublishedDiagnosis) -> None:
        self._store.set(DIAGNOSIS, json.dumps(diagnosis))
        self._store.add(READERS, 1)

    def read_diagnosis(self) -> PublishedDiagnosis | None:
        """What another rank has found; each call that finds it counts as a rank that knows."""
        if not self._has(DIAGNOSIS):
            return None
        self._store.add(READERS, 1)
        return PublishedDiagnosis(*self._read(DIAGNOSIS))

    def is_read_by_all(self) -> bool:
        """Whether every rank that lives has found, read or reported what has happened."""
        num_readers = self._store.add(READERS, 0)
        if not self._has(DIAGNOSIS):
            return num_readers >= self._world_size
        return num_readers >= PublishedDiagnosis(*self._read(DIAGNOSIS)).num_alive

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key))


def _key_of(rank: int) -> str:
    return f"heartbeat/{rank}"


def _address(store: Any) -> StoreAddress | None:
    """Of the server behind a store; None where it is not one of TCP."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    is_launchers = os.environ.get(IS_STORE_OF_LAUNCHER) == str(True)
    return StoreAddress(store.host, _look_up(store.host), store.port, not is_launchers)


def _look_up(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:  # then a later attempt to connect fails too, and says so
        return host
