"""Finds out why a run makes no progress: one rank compares all heartbeats, the others read its diagnosis.

The first rank to claim the task reads all heartbeats, waits for the next ones and compares them (`diagnose`,
a pure function). A failure that a rank has reported ends the search at once. Blame order:

1. Silent ranks, whose heartbeat has not changed between the two readings: they were killed or stopped, or
   have lost their network.
2. Stragglers: ranks that answer, but are not in the collective where the others wait. A straggler that moves
   between the readings is described as working, not as hung.
3. If all ranks wait, the line says so and names likely reasons.

If the store does not answer, a rank describes its own state after one attempt to connect, which distinguishes
a process that has ended from a machine that cannot be reached. Every operation has a time limit: healthy
ranks publish heartbeats between the readings, and everything else may take as long as an answer of the store.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from megalowbit.errors import (
    FAILED,
    HUNG,
    LEFT,
    LOST,
    NO_DATA,
    NO_PROGRESS,
    SLOW,
    TransientError,
    UserError,
)
from megalowbit.supervision.heartbeat import HeartbeatThread, StoreSilentError
from megalowbit.supervision.heartbeat_store import (
    DEFECT,
    DIAGNOSES,
    INTERRUPT,
    LOSS,
    MISTAKE,
    Heartbeat,
    HeartbeatSnapshot,
    PublishedDiagnosis,
)
from megalowbit.values import counted

INTERVALS_BETWEEN_READINGS = 2.5
ANSWERS_TO_READ = 0.75  # for noticing a published diagnosis; together with the readings
ANSWERS_FOR_READERS = 1.25
POLLS_AN_INTERVAL = 4
SHOWN_PLACES = 4  # if ranks wait in different places
SHOWN_RANGES = 8
SHOWN_HOSTS = 4


class Diagnosis(NamedTuple):
    """Why the run ends.

    Attributes:
        line: the message, without a full stop.
        kind: one of `heartbeat_store.KINDS`.
        is_local: this rank made the diagnosis and prints it; no other rank does.
        is_hang: a rank answers but is not where the others wait, so its stack is worth reading.
        is_open: no rank is at fault, so the error that was raised is added to the line.
        fault, culprit: as in `TransientError`.
    """

    line: str
    kind: str = LOSS
    is_local: bool = True
    is_hang: bool = False
    is_open: bool = False
    fault: str | None = None
    culprit: str | None = None

    def with_note(self, note: str) -> Diagnosis:
        """The same diagnosis with a note in parentheses at the end of its line."""
        return self._replace(line=f"{self.line} ({note})")

    def error(self) -> UserError | KeyboardInterrupt:
        """The exception that a rank raises for it."""
        if self.kind == INTERRUPT:
            return KeyboardInterrupt(self.line)
        error = UserError(self.line)
        if self.kind != MISTAKE:
            line = f"{self.line}; continue from the last checkpoint"
            error = TransientError(line, fault=self.fault, culprit=self.culprit)
        error.is_reported = not self.is_local
        return error


def diagnose_together(thread: HeartbeatThread, describe: Callable[[], Heartbeat], *, rank: int) -> Diagnosis:
    """Find out why the run makes no progress; every rank that notices calls this once.

    `thread` must still be running. `describe` returns this rank's current state.
    """
    try:
        if thread.execute(lambda store: store.claim(DIAGNOSES)):
            return _publish(thread, rank)
        return _read(thread, describe, rank)
    except StoreSilentError as silence:
        who, what = _describe_silent_store(thread, str(silence), describe().host)
        line = f"{who} {what}; {describe_rank(rank, describe())}"
        # the ranks have gone on without the launcher: something else may have failed since
        return Diagnosis(line, fault=LOST, culprit=who, is_open=thread.has_lost_launcher)


def wait_for_readers(thread: HeartbeatThread) -> None:
    """If the store ends with this process, wait until all ranks have read it, for a limited time."""
    if not thread.store.is_hosted_here:
        return
    end = time.monotonic() + ANSWERS_FOR_READERS * thread.seconds_to_answer
    try:
        while time.monotonic() < end and not thread.execute(lambda store: store.is_read_by_all()):
            time.sleep(thread.interval / POLLS_AN_INTERVAL)
    except StoreSilentError:
        return  # no rank can read it


def _publish(thread: HeartbeatThread, rank: int) -> Diagnosis:
    """Make the diagnosis and publish it for the others."""
    thread.execute(lambda store: store.raise_alarm())
    first = thread.execute(lambda store: store.heartbeats())
    end = time.monotonic() + INTERVALS_BETWEEN_READINGS * thread.interval
    while (failure := thread.execute(lambda store: store.failure())) is None and time.monotonic() < end:
        time.sleep(thread.interval / POLLS_AN_INTERVAL)
    if failure is not None:
        fault = FAILED if failure.kind == DEFECT else None
        diagnosis = Diagnosis(str(failure), failure.kind, fault=fault, culprit=failure.culprit)
        num_alive = len(first)
    else:
        snapshot = thread.execute(lambda store: store.snapshot(first))
        diagnosis = diagnose(snapshot, observer=rank)
        num_alive = len(snapshot.alive)
    published = PublishedDiagnosis(
        diagnosis.line, diagnosis.kind, num_alive, diagnosis.fault, diagnosis.culprit
    )
    thread.execute(lambda store: store.publish_diagnosis(published))
    return diagnosis


def _read(thread: HeartbeatThread, describe: Callable[[], Heartbeat], rank: int) -> Diagnosis:
    # as long as the diagnosing rank may take, plus the time to notice its result
    seconds = INTERVALS_BETWEEN_READINGS * thread.interval + ANSWERS_TO_READ * thread.seconds_to_answer
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        published = thread.execute(lambda store: store.read_diagnosis())
        if published is not None:
            return Diagnosis(
                published.line,
                published.kind,
                is_local=False,
                fault=published.fault,
                culprit=published.culprit,
            )
        time.sleep(thread.interval / POLLS_AN_INTERVAL)
    other = thread.execute(lambda store: store.claimed_by(DIAGNOSES))
    return Diagnosis(
        f"rank {other} was diagnosing the failure but ended before it finished; "
        f"{describe_rank(rank, describe())}",
        fault=LOST,
        culprit=f"rank {other}",
    )


def describe_rank(rank: int, heartbeat: Heartbeat) -> str:
    """`"rank 1 (host n2) waited 6 s in all_reduce (…) since step 7"`."""
    return f"rank {rank} (host {heartbeat.host}) {_describe_wait(heartbeat)} since {heartbeat.mark}"


def _describe_silent_store(thread: HeartbeatThread, silence: str, host: str) -> tuple[str, str]:
    """Who serves the store, and why it does not answer."""
    address = thread.store.address
    if address is None:
        return "the store of the process group", f"does not answer ({silence})"
    is_main = address.is_main_process
    who = f"the main process (rank 0, at {address})" if is_main else f"the launcher's store (at {address})"
    try:
        address.connect()
    except ConnectionRefusedError:
        if thread.has_lost_launcher and thread.lost_at is not None:
            seconds = time.monotonic() - thread.lost_at
            return who, f"ended {seconds:.0f} s ago: its port refuses connections"
        return who, "has ended: its port refuses connections"
    except OSError as error:
        return who, (
            f"cannot be reached ({error.strerror or error}): this machine (host {host}) or that one is "
            "down or cut off the network"
        )
    if thread.lost is not None:
        return who, "has ended: it has closed its connections"
    return who, f"does not answer, though its machine does ({silence}): it is stopped, hung or far too busy"


def diagnose(snapshot: HeartbeatSnapshot, *, observer: int) -> Diagnosis:
    """Find out what has happened.

    The line ends with where `observer`, the rank that noticed, waits, or another rank if it does not wait.

    Returns:
        Its line is like `"rank 1 (host n2) does not answer: silent since step 7 (…); rank 0 …"`.
    """
    found = (
        _describe_silent(snapshot, observer)
        or _describe_stragglers(snapshot)
        or _describe_common_wait(snapshot)
    )
    waiting = [rank for rank in snapshot.alive if snapshot.second[rank].is_waiting]
    if not waiting or found.is_open:
        return found
    witness = observer if observer in waiting else waiting[0]
    seen = f"{name_ranks([witness], snapshot.second)} {_describe_wait(snapshot.second[witness])}"
    return found._replace(line=f"{found.line}; {seen}")


def _describe_wait(heartbeat: Heartbeat) -> str:
    """`"waited 6 s in all_reduce (…)"`, or `"was 6 s in …"` outside of collectives."""
    return f"{'waited' if heartbeat.is_waiting else 'was'} {heartbeat.seconds:.0f} s in {heartbeat.place}"


def _describe_silent(snapshot: HeartbeatSnapshot, observer: int) -> Diagnosis | None:
    silent = snapshot.silent
    if not silent:
        return None
    known = {**snapshot.first, **snapshot.second}
    # all ranks take each step together, and a silent rank's last heartbeat may be from an earlier step
    since = f"silent since {known[observer].mark}" if observer in known else "silent"
    verb = "does" if len(silent) == 1 else "do"
    who = name_ranks(silent, known)
    line = f"{who} {verb} not answer: {since} (killed, stopped, or cut off the network)"
    return Diagnosis(line, fault=LOST, culprit=who)


def _describe_stragglers(snapshot: HeartbeatSnapshot) -> Diagnosis | None:
    stragglers = _stragglers(snapshot)
    if not stragglers:
        return None
    rank = stragglers[0]
    heartbeat = snapshot.second[rank]
    who, have = name_ranks(stragglers, snapshot.second), "have" if len(stragglers) > 1 else "has"
    is_one, place, mark = len(stragglers) == 1, heartbeat.place, heartbeat.mark
    if heartbeat.is_done:
        fault, what = LEFT, f"left training after {mark}, but the others have not"
    elif snapshot.is_stuck(rank):
        fault, what = HUNG, f"hung since {mark}, {f'in {place}' if is_one else f'rank {rank} in {place}'}"
    else:
        where = f"now in {place}" if is_one else f"rank {rank} is now in {place}"
        fault, what = SLOW, f"been working since {mark} ({heartbeat.seconds:.0f} s), {where}"
    return Diagnosis(f"{who} {have} {what}", is_hang=True, fault=fault, culprit=who)


def _stragglers(snapshot: HeartbeatSnapshot) -> list[int]:
    """Ranks that answer but are not where the others are.

    If any rank waits in a collective, stragglers are the ranks that do not. If none is seen to wait (as on
    GPUs, where a host waits for a number), they are the ranks outside the most common place. Empty if all
    ranks are in one place, or if two places are equally common.
    """
    heartbeats = {rank: snapshot.second[rank] for rank in snapshot.alive}
    if any(heartbeat.is_waiting for heartbeat in heartbeats.values()):
        return [rank for rank, heartbeat in heartbeats.items() if not heartbeat.is_waiting]
    places = Counter(heartbeat.place for heartbeat in heartbeats.values()).most_common()
    if len(places) < 2 or places[0][1] == places[1][1]:
        return []
    return [rank for rank, heartbeat in heartbeats.items() if heartbeat.place != places[0][0]]


def _describe_common_wait(snapshot: HeartbeatSnapshot) -> Diagnosis:
    """Describe a run in which no rank is silent and none is a straggler."""
    heartbeats = {rank: snapshot.second[rank] for rank in snapshot.alive}
    places: dict[str, list[int]] = {}
    for rank, heartbeat in heartbeats.items():
        places.setdefault(heartbeat.place, []).append(rank)
    heartbeat = next(iter(heartbeats.values()))
    since = f"since {heartbeat.mark} ({heartbeat.seconds:.0f} s)"
    if len(places) == 1:
        if not heartbeat.is_waiting:
            who = "all ranks" if len(heartbeats) > 1 else name_ranks(heartbeats, heartbeats)
            line = f"{who} {'have' if len(heartbeats) > 1 else 'has'} hung {since}, in {heartbeat.place}"
            return Diagnosis(line, is_open=True, fault=HUNG, culprit=who)
        line = (
            f"all ranks answer and have waited in {heartbeat.place} {since}: no data passes between them "
            "(check NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and the network links)"
        )
        return Diagnosis(line, is_open=True, fault=NO_DATA)
    shown = list(places.items())[:SHOWN_PLACES]
    parts = [f"{name_ranks(ranks, heartbeats)} in {place}" for place, ranks in shown]
    more = "" if len(places) <= SHOWN_PLACES else f", and {counted(len(places) - SHOWN_PLACES, 'more place')}"
    line = f"all ranks answer, but none has made progress {since}: {', '.join(parts)}{more}"
    return Diagnosis(line, is_open=True, fault=NO_PROGRESS)


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
