"""How a rank finds out what has happened: one looks and tells, the others read what it found.

The first to claim it reads everybody's beat, waits for the next ones and compares (`engine.verdict`); a
failure that a rank has reported of itself ends the search at once. Where the store does not answer there is
nobody to ask: then this rank says what it knows by itself, after one attempt to connect that tells a
process that has ended from a machine that cannot be reached. Every step has a time limit; all take less
than four intervals.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from megalowbit.supervision.diagnosis import Beat, blame, has_culprit_elsewhere, waited
from megalowbit.supervision.heartbeat import Heartbeat, StoreSilentError
from megalowbit.supervision.heartbeat_store import LOOKS, LOSS, Finding

INTERVALS_BETWEEN_LOOKS = 2.5
INTERVALS_FOR_READERS = 2.5
POLLS_AN_INTERVAL = 4
SECONDS_TO_CONNECT = 2.0


class Verdict(NamedTuple):
    """Why the run ends.

    Attributes:
        line: for people, without full stop.
        kind: one of `notice_board.KINDS`.
        is_mine: this rank tells it, and no other.
        is_hang: some rank answers but does not come, so its stack says more.
        is_open: nobody is to blame, so the error that a rank has met says more.
    """

    line: str
    kind: str = LOSS
    is_mine: bool = True
    is_hang: bool = False
    is_open: bool = False


def inquire(heartbeat: Heartbeat, describe: Callable[[], Beat], *, rank: int) -> Verdict:
    """Find out why the run does not go on; every rank that notices calls this, once.

    Args:
        heartbeat: of this rank, still beating.
        describe: this rank's own state.
        rank: this one.
    """
    try:
        if heartbeat.ask(lambda board: board.claim(LOOKS)):
            return _look(heartbeat, rank)
        return _read(heartbeat, describe, rank)
    except StoreSilentError as silence:
        line = _of_silent_store(heartbeat, str(silence), describe().host)
        return Verdict(f"{line}; {_own(describe(), rank)}")


def wait_until_known(heartbeat: Heartbeat) -> None:
    """Stay until all others know, where the notes end with this process; some intervals at most."""
    if not heartbeat.board.is_served_here:
        return
    end = time.monotonic() + INTERVALS_FOR_READERS * heartbeat.interval
    try:
        while time.monotonic() < end and not heartbeat.ask(lambda board: board.is_known_to_all()):
            time.sleep(heartbeat.interval / POLLS_AN_INTERVAL)
    except StoreSilentError:
        return  # nobody can read


def _look(heartbeat: Heartbeat, rank: int) -> Verdict:
    heartbeat.ask(lambda board: board.raise_alarm())
    first = heartbeat.ask(lambda board: board.beats())
    end = time.monotonic() + INTERVALS_BETWEEN_LOOKS * heartbeat.interval
    while (failure := heartbeat.ask(lambda board: board.failure())) is None and time.monotonic() < end:
        time.sleep(heartbeat.interval / POLLS_AN_INTERVAL)
    if failure is not None:
        finding = Finding(str(failure), failure.kind, len(first))
        verdict = Verdict(finding.line, finding.kind)
    else:
        look = heartbeat.ask(lambda board: board.look(first))
        finding = Finding(blame(look, observer=rank), LOSS, len(look.living))
        is_hang = has_culprit_elsewhere(look)
        verdict = Verdict(finding.line, is_hang=is_hang, is_open=not (is_hang or look.silent))
    heartbeat.ask(lambda board: board.tell(finding))
    return verdict


def _read(heartbeat: Heartbeat, describe: Callable[[], Beat], rank: int) -> Verdict:
    # as long as the other one may take, and for the notice to come to it
    end = time.monotonic() + (INTERVALS_BETWEEN_LOOKS + 1.5) * heartbeat.interval
    while time.monotonic() < end:
        finding = heartbeat.ask(lambda board: board.finding())
        if finding is not None:
            return Verdict(finding.line, finding.kind, is_mine=False)
        time.sleep(heartbeat.interval / POLLS_AN_INTERVAL)
    other = heartbeat.ask(lambda board: board.claimant(LOOKS))
    return Verdict(
        f"rank {other} was to find out why the run stands still, and has ended; {_own(describe(), rank)}"
    )


def _own(beat: Beat, rank: int) -> str:
    return f"rank {rank} (host {beat.host}) {waited(beat)} since {beat.mark}"


def _of_silent_store(heartbeat: Heartbeat, silence: str, host: str) -> str:
    address = heartbeat.board.address
    if address is None:
        return f"the store of the process group does not answer ({silence})"
    who = "the main process (rank 0" if address.is_main_process else "the launcher's store ("
    who += f", at {address})" if address.is_main_process else f"at {address})"
    try:
        socket.create_connection((address.number, address.port), SECONDS_TO_CONNECT).close()
    except ConnectionRefusedError:
        return f"{who} has ended: its port refuses connections"
    except OSError as error:
        return (
            f"{who} cannot be reached ({error.strerror or error}): this machine (host {host}) or that one is "
            "down or cut off the network"
        )
    if heartbeat.lost is not None:
        return f"{who} has ended: it has closed its connections"
    return f"{who} does not answer, though its machine does ({silence}): it is stopped, hung or far too busy"
