"""Which rank is to blame, from what all ranks have said of themselves twice: pure, and one line for people.

A rank that says nothing new between the two looks has been killed or stopped, or is cut off the network. Of
the others those are named that are not where the rest waits. Where all wait, the line says so and what that
can mean. A step that goes on, only slowly, is told as slow and not as hung.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

SHOWN_PLACES = 4  # of ranks that wait in different places
SHOWN_RANGES = 8
SHOWN_HOSTS = 4


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank says of itself, a few times per timeout.

    Attributes:
        count: grows with every beat; a rank is silent where it does not.
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
    def from_text(cls, text: str | bytes) -> Beat:
        """The counterpart of `to_text`."""
        return cls(**json.loads(text))


class Look(NamedTuple):
    """The beats of all ranks, twice, a few intervals apart; ranks that never gave one are missing."""

    first: Mapping[int, Beat]
    second: Mapping[int, Beat]
    world_size: int

    @property
    def silent(self) -> list[int]:
        """Ranks that have said nothing new."""
        return [rank for rank in range(self.world_size) if not self._has_spoken(rank)]

    @property
    def living(self) -> list[int]:
        """Ranks that have."""
        return [rank for rank in range(self.world_size) if self._has_spoken(rank)]

    def _has_spoken(self, rank: int) -> bool:
        now, before = self.second.get(rank), self.first.get(rank)
        return now is not None and (now.is_done or before is None or now.count > before.count)

    def is_stuck(self, rank: int) -> bool:
        """Whether its main thread was at the same place both times."""
        before, now = self.first.get(rank), self.second[rank]
        return before is not None and (before.place, before.mark) == (now.place, now.mark)


def blame(look: Look, *, observer: int) -> str:
    """Say what has happened.

    Args:
        look: what is known of all ranks.
        observer: the rank that has noticed; its own waiting is told too, or another's if it does not wait.

    Returns:
        A line without full stop: `"rank 1 (host n2) does not answer: silent since step 7 (…); rank 0 …"`.
    """
    told = _of_silent(look, observer) or _of_elsewhere(look) or _of_all(look)
    waiting = [rank for rank in look.living if look.second[rank].is_waiting]
    if not waiting or told.startswith("all ranks"):
        return told
    witness = observer if observer in waiting else waiting[0]
    return f"{told}; {named([witness], look.second)} {waited(look.second[witness])}"


def waited(beat: Beat) -> str:
    """`"waited 6 s in all_reduce (…)"`, or where it was."""
    return f"{'waited' if beat.is_waiting else 'was'} {beat.seconds:.0f} s in {beat.place}"


def has_culprit_elsewhere(look: Look) -> bool:
    """Whether a rank answers and is not where others wait, so that its stack is worth a look."""
    return not look.silent and bool(_elsewhere(look))


def _of_silent(look: Look, observer: int) -> str | None:
    silent = look.silent
    if not silent:
        return None
    known = {**look.first, **look.second}
    # steps are common to all; what the silent said last may be older than the step they were lost in
    since = f"silent since {known[observer].mark}" if observer in known else "silent"
    verb = "does" if len(silent) == 1 else "do"
    return f"{named(silent, known)} {verb} not answer: {since} (killed, stopped, or cut off the network)"


def _of_elsewhere(look: Look) -> str | None:
    elsewhere = _elsewhere(look)
    if not elsewhere:
        return None
    rank = elsewhere[0]
    beat = look.second[rank]
    who, verb = named(elsewhere, look.second), "" if len(elsewhere) > 1 else "s"
    if beat.is_done:
        have = "have" if len(elsewhere) > 1 else "has"
        return f"{who} {have} ended training after {beat.mark}, the others have not"
    example = "" if len(elsewhere) == 1 else f"rank {rank} "
    if look.is_stuck(rank):
        return f"{who} hang{verb} since {beat.mark}: {example}is in {beat.place}"
    return f"{who} work{verb} since {beat.mark} for {beat.seconds:.0f} s: {example}is now in {beat.place}"


def _elsewhere(look: Look) -> list[int]:
    """Living ranks that are not where the others are; none where all are alike, or as many here as there.

    Waiting in a collective is where others are. Where no rank is seen to (as with GPUs, that wait inside a
    number's way to the host), the place that most ranks share is.
    """
    beats = {rank: look.second[rank] for rank in look.living}
    if any(beat.is_waiting for beat in beats.values()):
        return [rank for rank, beat in beats.items() if not beat.is_waiting]
    places = Counter(beat.place for beat in beats.values()).most_common()
    if len(places) < 2 or places[0][1] == places[1][1]:
        return []
    return [rank for rank, beat in beats.items() if beat.place != places[0][0]]


def _of_all(look: Look) -> str:
    """Where nobody is silent, and nobody elsewhere."""
    beats = {rank: look.second[rank] for rank in look.living}
    places: dict[str, list[int]] = {}
    for rank, beat in beats.items():
        places.setdefault(beat.place, []).append(rank)
    beat = next(iter(beats.values()))
    since = f"since {beat.mark}, for {beat.seconds:.0f} s"
    if len(places) == 1:
        if not beat.is_waiting:
            who = "all ranks hang" if len(beats) > 1 else f"{named(beats, beats)} hangs"
            return f"{who} {since}: {'they are' if len(beats) > 1 else 'it is'} in {beat.place}"
        return (
            f"all ranks answer and wait in {beat.place} {since}: no data pass between them "
            "(NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, a link that is down)"
        )
    parts = [f"{named(ranks, beats)} in {place}" for place, ranks in list(places.items())[:SHOWN_PLACES]]
    more = "" if len(places) <= SHOWN_PLACES else f", and {len(places) - SHOWN_PLACES} places more"
    return f"all ranks answer and none goes on {since}: {', '.join(parts)}{more}"


def named(ranks: Iterable[int], known: Mapping[int, Beat]) -> str:
    """`"rank 1 (host n2)"`, `"ranks 8-15, 24 (hosts n2, n4)"`."""
    ranks = sorted(ranks)
    ranges = []
    for _, group in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    listed = ", ".join(ranges[:SHOWN_RANGES])
    if len(ranges) > SHOWN_RANGES:
        listed += f", … ({len(ranks)} in all)"
    hosts = list(dict.fromkeys(known[rank].host for rank in ranks if rank in known))
    where = ", ".join(hosts[:SHOWN_HOSTS])
    if len(hosts) > SHOWN_HOSTS:
        where += f" and {len(hosts) - SHOWN_HOSTS} more"
    ending = f" (host{'s' if len(hosts) > 1 else ''} {where})" if hosts else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{ending}"
