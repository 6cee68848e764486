"""Exchanges heartbeats and diagnoses in the process group's key-value store, next to its collectives.

Every rank keeps one entry, its heartbeat; a healthy run writes nothing else. After a failure there are a few
more entries:

- the alarm,
- the rank that makes the diagnosis: the first that claims the task,
- the failure that a rank reports about itself,
- the diagnosis, which all other ranks read.

With any number of ranks, one makes the diagnosis and one prints it. Calls use a separate connection (a
clone), because the group's connection may be blocked in a wait. They block while the network is down, so a
thread makes them on which no other thread depends. Values are JSON.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

ALARM, FAILURE, DIAGNOSIS, READERS, ENTERED = "alarm", "failure", "diagnosis", "informed", "entered"
DIAGNOSES, REPORTS_SIGTERM = "diagnoses", "reports SIGTERM"  # tasks that a single rank claims
IS_STORE_OF_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"
# a retry would repeat a mistake; an interrupt was requested; a defect or loss may be gone at the next attempt
KINDS = DEFECT, MISTAKE, INTERRUPT, LOSS = "defect", "mistake", "interrupt", "loss"
KEYS_A_REQUEST = 256
SECONDS_TO_CONNECT = SECONDS_TO_CLOSE = 2.0
SECONDS_BETWEEN_CONNECTIONS = 0.1
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The state of a rank, published several times per timeout.

    Attributes:
        count: increases with every heartbeat; a rank whose count does not change is silent.
        mark: the current phase of the training loop: `"step 7"`, `"the save of step 7"`.
        seconds: time since that phase began.
        place: where the main thread is.
        is_waiting: the main thread waits for other ranks in a collective.
        is_done: the rank has left training without an error.
        host: name of the machine.
    """

    count: int
    mark: str
    seconds: float
    place: str
    is_waiting: bool
    is_done: bool = False
    host: str

    def to_text(self) -> str:
        """The JSON text kept in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Heartbeat:
        return cls(**json.loads(text))


class HeartbeatSnapshot(NamedTuple):
    """Two readings of all heartbeats, a few intervals apart; ranks without a heartbeat are missing."""

    first: Mapping[int, Heartbeat]
    second: Mapping[int, Heartbeat]
    world_size: int

    @property
    def silent(self) -> list[int]:
        """Ranks without a new heartbeat in the second reading."""
        return [rank for rank in range(self.world_size) if not self._has_answered(rank)]

    @property
    def alive(self) -> list[int]:
        """Ranks with a new heartbeat, or that have left training."""
        return [rank for rank in range(self.world_size) if self._has_answered(rank)]

    def _has_answered(self, rank: int) -> bool:
        now, before = self.second.get(rank), self.first.get(rank)
        return now is not None and (now.is_done or before is None or now.count > before.count)

    def is_stuck(self, rank: int) -> bool:
        """Whether the rank's main thread was at the same place in both readings."""
        before, now = self.first.get(rank), self.second[rank]
        return before is not None and (before.place, before.mark) == (now.place, now.mark)


class FailureReport(NamedTuple):
    """A rank's report of its own failure: the phase of its loop and the error it raised."""

    rank: int
    host: str
    mark: str
    line: str
    kind: str  # one of `KINDS`

    @property
    def culprit(self) -> str:
        """The rank, as messages name it."""
        return f"rank {self.rank} (host {self.host})"

    def __str__(self) -> str:
        where = " (its own output says where)" if self.kind == DEFECT else ""
        return f"{self.culprit} failed in {self.mark}: {self.line}{where}"


class PublishedDiagnosis(NamedTuple):
    """The diagnosis as one line, published by the rank that made it."""

    line: str
    kind: str  # one of `KINDS`
    num_alive: int  # ranks that are expected to read it, including the one that publishes it
    fault: str | None = None  # as in `TransientError`
    culprit: str | None = None


class StoreAddress(NamedTuple):
    """Address of the process that serves the store.

    Attributes:
        host: the name that the ranks were given.
        number: its IP address; names cannot be looked up while the network is down.
        port: TCP port.
        is_main_process: whether the main process serves the store, rather than the launcher.
    """

    host: str
    number: str
    port: int
    is_main_process: bool

    def connect(self) -> None:
        """Connect once.

        Raises:
            OSError: the port refuses connections, or the machine cannot be reached in `SECONDS_TO_CONNECT`.
        """
        socket.create_connection((self.number, self.port), SECONDS_TO_CONNECT).close()

    def closes_within(self, seconds: float) -> bool:
        """Whether the port refuses connections, because its process has ended; waits for it to end.

        The connections of a process that ends may close before its port does.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                self.connect()
            except ConnectionRefusedError:
                return True
            except ConnectionError:
                pass  # it is closing
            except OSError:
                return False
            if time.monotonic() >= end:
                return False
            time.sleep(SECONDS_BETWEEN_CONNECTIONS)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class HeartbeatStore:
    """The store entries of one training loop; every method makes one or a few requests."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Open a connection. Needs a process group; every rank must create its stores equally often."""
        from torch.distributed import distributed_c10d

        store = distributed_c10d._get_default_store()
        self.address = _address(store)
        clone = store.clone()  # type: ignore[attr-defined]
        own = dist.PrefixStore(f"megalowbit-watchdog/{os.environ.get(ATTEMPT, '0')}", clone)
        # one process may run several loops: entries of an earlier one must not alarm the next
        loop = (own.add(ENTERED, 1) - 1) // world_size
        self._store = dist.PrefixStore(f"{loop}", own)
        self._rank, self._world_size = rank, world_size

    @property
    def is_hosted_here(self) -> bool:
        """Whether the store ends with this process."""
        return self._rank == 0 and (self.address is None or self.address.is_main_process)

    def publish(self, heartbeat: Heartbeat) -> None:
        self._store.set(_key_of(self._rank), heartbeat.to_text())

    def heartbeats(self) -> dict[int, Heartbeat]:
        """The heartbeats of all ranks that have published one."""
        ranks = [
            rank
            for start in range(0, self._world_size, KEYS_A_REQUEST)
            for rank in self._present(range(start, min(start + KEYS_A_REQUEST, self._world_size)))
        ]
        texts = self._store.multi_get([_key_of(rank) for rank in ranks]) if ranks else []
        return {rank: Heartbeat.from_text(text) for rank, text in zip(ranks, texts, strict=True)}

    def heartbeat(self, rank: int) -> Heartbeat | None:
        """The heartbeat of one rank, or None if it has not published any."""
        key = _key_of(rank)
        return Heartbeat.from_text(self._store.get(key)) if self._has(key) else None

    def _present(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of `ranks` that have published a heartbeat; a single request if all have."""
        if self._store.check([_key_of(rank) for rank in ranks]):
            return ranks
        return [rank for rank in ranks if self._store.check([_key_of(rank)])]

    def snapshot(self, first: Mapping[int, Heartbeat]) -> HeartbeatSnapshot:
        """Combine an earlier reading of the heartbeats with a new one."""
        return HeartbeatSnapshot(first, self.heartbeats(), self._world_size)

    def raise_alarm(self) -> None:
        """Signal to every rank that something has failed."""
        self._store.set(ALARM, "1")

    def is_alarmed(self) -> bool:
        return self._has(ALARM)

    def claim(self, what: str) -> bool:
        """Claim a task for this rank; False if another rank has claimed it."""
        return int(self._store.compare_set(what, "", str(self._rank))) == self._rank

    def claimed_by(self, what: str) -> int | None:
        """The rank that has claimed a task, if any."""
        return int(self._store.get(what)) if self._has(what) else None

    def report(self, failure: FailureReport) -> None:
        """Publish a failure, unless another rank has published one already, and raise the alarm."""
        self._store.compare_set(FAILURE, "", json.dumps(failure))
        self._store.add(READERS, 1)
        self.raise_alarm()

    def failure(self) -> FailureReport | None:
        return FailureReport(*self._read(FAILURE)) if self._has(FAILURE) else None

    def publish_diagnosis(self, diagnosis: PublishedDiagnosis) -> None:
        self._store.set(DIAGNOSIS, json.dumps(diagnosis))
        self._store.add(READERS, 1)

    def read_diagnosis(self) -> PublishedDiagnosis | None:
        """The published diagnosis, if any; each successful call counts this rank as a reader."""
        if not self._has(DIAGNOSIS):
            return None
        self._store.add(READERS, 1)
        return PublishedDiagnosis(*self._read(DIAGNOSIS))

    def is_read_by_all(self) -> bool:
        """Whether every rank that answers has made, read or reported the diagnosis."""
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
    """Address of the server behind a store; None if it is not a TCP store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    is_launchers = os.environ.get(IS_STORE_OF_LAUNCHER) == str(True)
    return StoreAddress(store.host, _look_up(store.host), store.port, not is_launchers)


def _look_up(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:  # a later attempt to connect will fail too, and will be reported
        return host
