"""What ranks tell each other beside their collectives: notes in the store that the group began with.

Every rank keeps one note of its own (its beat). Beyond that a run that goes well writes nothing. When
something has failed there are a few notes more: that there is an alarm, who looks into it (the first who
says so), a rank's own account of its failure, and the finding, which all others read, so that one rank asks
and one speaks, however many there are. All calls go through a connection of its own (a clone), since the
group's may be waiting; they block while the network is cut, so a thread makes them that nobody waits for.
Values are JSON.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from megalowbit.supervision.diagnosis import Beat, Look

ALARM, FAILURE, FINDING, INFORMED, ENTERED = "alarm", "failure", "finding", "informed", "entered"
LOOKS, TELLS_OF_SIGTERM = "looks", "tells of SIGTERM"  # what one rank alone does
IS_STORE_OF_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"
# a mistake is found again by the next try, an interrupt was asked for, and the rest may have gone
KINDS = DEFECT, MISTAKE, INTERRUPT, LOSS = "defect", "mistake", "interrupt", "loss"
KEYS_A_REQUEST = 256
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


class Failure(NamedTuple):
    """A rank's own account of why it ends.

    Attributes:
        rank: whose.
        host: its machine.
        mark: what its loop was at.
        line: what it raised.
        kind: one of `KINDS`.
    """

    rank: int
    host: str
    mark: str
    line: str
    kind: str

    def __str__(self) -> str:
        where = " (its own output says where)" if self.kind == DEFECT else ""
        return f"rank {self.rank} (host {self.host}) failed in {self.mark}: {self.line}{where}"


class Finding(NamedTuple):
    """What the rank that looked has found.

    Attributes:
        line: for people.
        kind: see `Failure`.
        living: ranks that are expected to read it, the finder among them.
    """

    line: str
    kind: str
    living: int


class Address(NamedTuple):
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


class NoticeBoard:
    """The notes of one training loop; every method is one or a few requests to the store."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Open a connection; needs a process group, and all ranks to come by as often.

        Args:
            rank: of this process.
            world_size: how many write here.
        """
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
    def is_served_here(self) -> bool:
        """Whether the notes end with this process."""
        return self._rank == 0 and (self.address is None or self.address.is_main_process)

    def publish(self, beat: Beat) -> None:
        """Replace this rank's beat."""
        self._store.set(_beat_key(self._rank), beat.to_text())

    def beats(self) -> dict[int, Beat]:
        """Of all ranks that have given one."""
        ranks = [
            rank
            for start in range(0, self._world_size, KEYS_A_REQUEST)
            for rank in self._present(range(start, min(start + KEYS_A_REQUEST, self._world_size)))
        ]
        texts = self._store.multi_get([_beat_key(rank) for rank in ranks]) if ranks else []
        return {rank: Beat.from_text(text) for rank, text in zip(ranks, texts, strict=True)}

    def _present(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of some ranks that have given a beat: one request if all have."""
        if self._store.check([_beat_key(rank) for rank in ranks]):
            return ranks
        return [rank for rank in ranks if self._store.check([_beat_key(rank)])]

    def look(self, first: dict[int, Beat]) -> Look:
        """Compare an earlier reading of beats with one of now."""
        return Look(first, self.beats(), self._world_size)

    def raise_alarm(self) -> None:
        """Let every rank know that there is something to read."""
        self._store.set(ALARM, "1")

    def is_alarmed(self) -> bool:
        """Whether some rank has raised an alarm."""
        return self._has(ALARM)

    def claim(self, what: str) -> bool:
        """Become the rank that does something for all; False if another is."""
        return int(self._store.compare_set(what, "", str(self._rank))) == self._rank

    def claimant(self, what: str) -> int | None:
        """The rank that does it, if any."""
        return int(self._store.get(what)) if self._has(what) else None

    def report(self, failure: Failure) -> None:
        """Leave a failure to be found, unless there is one already, and raise the alarm."""
        self._store.compare_set(FAILURE, "", json.dumps(failure))
        self._store.add(INFORMED, 1)
        self.raise_alarm()

    def failure(self) -> Failure | None:
        """The first that was reported."""
        return Failure(*self._read(FAILURE)) if self._has(FAILURE) else None

    def tell(self, finding: Finding) -> None:
        """Let all ranks read what was found."""
        self._store.set(FINDING, json.dumps(finding))
        self._store.add(INFORMED, 1)

    def finding(self) -> Finding | None:
        """What another rank has found; each call that finds it counts as a rank that knows."""
        if not self._has(FINDING):
            return None
        self._store.add(INFORMED, 1)
        return Finding(*self._read(FINDING))

    def is_known_to_all(self) -> bool:
        """Whether every rank that lives has found, read or reported what has happened."""
        informed = self._store.add(INFORMED, 0)
        living = Finding(*self._read(FINDING)).living if self._has(FINDING) else self._world_size
        return informed >= living

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key))


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _address(store: Any) -> Address | None:
    """Of the server behind a store; None where it is not one of TCP."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    is_launchers = os.environ.get(IS_STORE_OF_LAUNCHER) == str(True)
    return Address(store.host, _look_up(store.host), store.port, not is_launchers)


def _look_up(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:  # then a later attempt to connect fails too, and says so
        return host
