"""Why a run does not go on: one rank finds out from the heartbeats of all, the others read its diagnosis.

The first rank to claim it reads everybody's heartbeat, waits for the next ones and compares (`diagnose`, a
pure function); a failure that a rank has reported ends the search at once. A rank that says nothing new
between the two readings has been killed or stopped, or is cut off the network. Of the others those are named
that are not where the rest waits. Where all wait, the line says so and what that can mean. A step that goes
on, only slowly, is called slow and not hung.

Where the store does not answer there is nobody to ask: then a rank says what it knows by itself, after one
attempt to connect that tells a process that has ended from a machine that cannot be reached. Every step has a
time limit; all take less than four intervals.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from megalowbit.supervision.heartbeat import HeartbeatThread, StoreSilentError
from megalowbit.supervision.heartbeat_store import (
    DIAGNOSES,
    LOSS,
    Heartbeat,
    HeartbeatSnapshot,
    PublishedDiagnosis,
)

INTERVALS_BETWEEN_READINGS = 2.5
INTERVALS_FOR_READERS = 2.5
POLLS_AN_INTERVAL = 4
SECONDS_TO_CONNECT = 2.0
SHOWN_PLACES = 4  # of ranks that wait in different places
SHOWN_RANGES = 8
SHOWN_HOSTS = 4


class Diagnosis(NamedTuple):
    """Why the run ends.

    Attributes:
        line: for people, without full stop.
        kind: one of `heartbeat_store.KINDS`.
        is_local: this rank prints it, and no other.
        is_hang: some rank answers but does not come, so its stack says more.
        is_open: no rank is the cause, so the error that a rank has met says more.
    """

    line: str
    kind: str = LOSS
    is_local: bool = True
    is_hang: bool = False
    is_open: bool = False


def diagnose_together(thread: HeartbeatThread, describe: Callable[[], Heartbeat], *, rank: int) -> Diagnosis:
    """Find out why the run does not go on; every rank that notices calls this, once, while it still beats.

    `describe` gives this rank's own state.
    """
    try:
        if thread.ask(lambda store: store.claim(DIAGNOSES)):
            return _publish(thread, rank)
        return _read(thread, describe, rank)
    except StoreSilentError as silence:
        line = _of_silent_store(thread, str(silence), describe().host)
        return Diagnosis(f"{line}; {describe_rank(rank, describe())}")


def wait_until_known(thread: HeartbeatThread) -> None:
    """Stay until all others know, where the store ends with this process; some intervals at most."""
    if not thread.store.is_served_here:
        return
    end = time.monotonic() + INTERVALS_FOR_READERS * thread.interval
    try:
        while time.monotonic() < end and not thread.ask(lambda store: store.is_known_to_all()):
            time.sleep(thread.interval / POLLS_AN_INTERVAL)
    except StoreSilentError:
        return  # nobody can read


def _publish(thread: HeartbeatThread, rank: int) -> Diagnosis:
    """Find out, and let the others read it."""
    thread.ask(lambda store: store.raise_alarm())
    first = thread.ask(lambda store: store.heartbeats())
    end = time.monotonic() + INTERVALS_BETWEEN_READINGS * thread.interval
    while (failure := thread.ask(lambda store: store.failure())) is None and time.monotonic() < end:
        time.sleep(thread.interval / POLLS_AN_INTERVAL)
    if failure is not None:
        diagnosis, living = Diagnosis(str(failure), failure.kind), len(first)
    else:
        snapshot = thread.ask(lambda store: store.snapshot(first))
        is_hang = has_culprit_elsewhere(snapshot)
        is_open = not (is_hang or snapshot.silent)
        diagnosis = Diagnosis(diagnose(snapshot, observer=rank), is_hang=is_hang, is_open=is_open)
        living = len(snapshot.living)
    published = PublishedDiagnosis(diagnosis.line, diagnosis.kind, living)
    thread.ask(lambda store: store.publish_diagnosis(published))
    return diagnosis


def _read(thread: HeartbeatThread, describe: Callable[[], Heartbeat], rank: int) -> Diagnosis:
    # as long as the other one may take, and until it is noticed
    end = time.monotonic() + (INTERVALS_BETWEEN_READINGS + 1.5) * thread.interval
    while time.monotonic() < end:
        published = thread.ask(lambda store: store.read_diagnosis())
        if published is not None:
            return Diagnosis(published.line, published.kind, is_local=False)
        time.sleep(thread.interval / POLLS_AN_INTERVAL)
    other = thread.ask(lambda store: store.claimant(DIAGNOSES))
    return Diagnosis(
        f"rank {other} was to find out why the run stands still, and has ended; "
        f"{describe_rank(rank, describe())}"
    )


def describe_rank(rank: int, heartbeat: Heartbeat) -> str:
    """`"rank 1 (host n2) waited 6 s in all_reduce (…) since step 7"`."""
    return f"rank {rank} (host {heartbeat.host}) {_describe_wait(heartbeat)} since {heartbeat.mark}"


def _of_silent_store(thread: HeartbeatThread, silence: str, host: str) -> str:
    address = thread.store.address
    if address is None:
        return f"the store of the process group does not answer ({silence})"
    is_main = address.is_main_process
    who = f"the main process (rank 0, at {address})" if is_main else f"the launcher's store (at {address})"
    try:
        socket.create_connection((address.number, address.port), SECONDS_TO_CONNECT).close()
    except ConnectionRefusedError:
        return f"{who} has ended: its port refuses connections"
    except OSError as error:
        return (
            f"{who} cannot be reached ({error.strerror or error}): this machine (host {host}) or that one is "
            "down or cut off the network"
        )
    if thread.lost is not None:
        return f"{who} has ended: it has closed its connections"
    return f"{who} does not answer, though its machine does ({silence}): it is stopped, hung or far too busy"


def diagnose(snapshot: HeartbeatSnapshot, *, observer: int) -> str:
    """Say what has happened.

    The waiting of `observer`, the rank that has noticed, is added, or another's if it does not wait.

    Returns:
        A line without full stop: `"rank 1 (host n2) does not answer: silent since step 7 (…); rank 0 …"`.
    """
    line = _of_silent(snapshot, observer) or _of_elsewhere(snapshot) or _of_all(snapshot)
    waiting = [rank for rank in snapshot.living if snapshot.second[rank].is_waiting]
    if not waiting or line.startswith("all ranks"):
        return line
    witness = observer if observer in waiting else waiting[0]
    return f"{line}; {name_ranks([witness], snapshot.second)} {_describe_wait(snapshot.second[witness])}"


def _describe_wait(heartbeat: Heartbeat) -> str:
    """`"waited 6 s in all_reduce (…)"`, or where it was."""
    return f"{'waited' if heartbeat.is_waiting else 'was'} {heartbeat.seconds:.0f} s in {heartbeat.place}"


def has_culprit_elsewhere(snapshot: HeartbeatSnapshot) -> bool:
    """Whether a rank answers and is not where others wait, so that its stack is worth a look."""
    return not snapshot.silent and bool(_elsewhere(snapshot))


def _of_silent(snapshot: HeartbeatSnapshot, observer: int) -> str | None:
    silent = snapshot.silent
    if not silent:
        return None
    known = {**snapshot.first, **snapshot.second}
    # steps are common to all; what the silent said last may be older than the step they were lost in
    since = f"silent since {known[observer].mark}" if observer in known else "silent"
    verb = "does" if len(silent) == 1 else "do"
    return f"{name_ranks(silent, known)} {verb} not answer: {since} (killed, stopped, or cut off the network)"


def _of_elsewhere(snapshot: HeartbeatSnapshot) -> str | None:
    elsewhere = _elsewhere(snapshot)
    if not elsewhere:
        return None
    rank = elsewhere[0]
    heartbeat = snapshot.second[rank]
    who, verb = name_ranks(elsewhere, snapshot.second), "" if len(elsewhere) > 1 else "s"
    if heartbeat.is_done:
        have = "have" if len(elsewhere) > 1 else "has"
        return f"{who} {have} ended training after {heartbeat.mark}, the others have not"
    example = "" if len(elsewhere) == 1 else f"rank {rank} "
    if snapshot.is_stuck(rank):
        return f"{who} hang{verb} since {heartbeat.mark}: {example}is in {heartbeat.place}"
    seconds = f"{heartbeat.seconds:.0f} s"
    return f"{who} work{verb} since {heartbeat.mark} for {seconds}: {example}is now in {heartbeat.place}"


def _elsewhere(snapshot: HeartbeatSnapshot) -> list[int]:
    """Living ranks that are not where the others are; none where all are, or as many here as there.

    Waiting in a collective is where others are. Where no rank is seen to wait (as with GPUs, where a host
    waits for a number), the place that most ranks share is.
    """
    heartbeats = {rank: snapshot.second[rank] for rank in snapshot.living}
    if any(heartbeat.is_waiting for heartbeat in heartbeats.values()):
        return [rank for rank, heartbeat in heartbeats.items() if not heartbeat.is_waiting]
    places = Counter(heartbeat.place for heartbeat in heartbeats.values()).most_common()
    if len(places) < 2 or places[0][1] == places[1][1]:
        return []
    return [rank for rank, heartbeat in heartbeats.items() if heartbeat.place != places[0][0]]


def _of_all(snapshot: HeartbeatSnapshot) -> str:
    """Where nobody is silent, and nobody elsewhere."""
    heartbeats = {rank: snapshot.second[rank] for rank in snapshot.living}
    places: dict[str, list[int]] = {}
    for rank, heartbeat in heartbeats.items():
        places.setdefault(heartbeat.place, []).append(rank)
    heartbeat = next(iter(heartbeats.values()))
    since = f"since {heartbeat.mark}, for {heartbeat.seconds:.0f} s"
    if len(places) == 1:
        if not heartbeat.is_waiting:
            who = "all ranks hang" if len(heartbeats) > 1 else f"{name_ranks(heartbeats, heartbeats)} hangs"
            return f"{who} {since}: {'they are' if len(heartbeats) > 1 else 'it is'} in {heartbeat.place}"
        return (
            f"all ranks answer and wait in {heartbeat.place} {since}: no data pass between them "
            "(NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, a link that is down)"
        )
    shown = list(places.items())[:SHOWN_PLACES]
    parts = [f"{name_ranks(ranks, heartbeats)} in {place}" for place, ranks in shown]
    more = "" if len(places) <= SHOWN_PLACES else f", and {len(places) - SHOWN_PLACES} places more"
    return f"all ranks answer and none goes on {since}: {', '.join(parts)}{more}"


def name_ranks(ranks: Iterable[int], known: Mapping[int, Heartbeat]) -> str:
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
