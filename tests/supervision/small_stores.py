"""Heartbeat stores of several ranks in one process, over a real store."""

import itertools
import os

from megalowbit.engine.process_start import start_process_group
from megalowbit.supervision.heartbeat_store import Heartbeat, HeartbeatStore

ATTEMPTS = itertools.count(1)


def stores(count, monkeypatch):
    """One for each of `count` ranks, with nothing in them yet."""
    start_process_group()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", f"{os.getpid()}-{next(ATTEMPTS)}")
    return [HeartbeatStore(rank, count) for rank in range(count)]


def heartbeat(count=1, place="all_reduce (a.py:1 f)", is_waiting=True, host="n1"):
    return Heartbeat(count=count, mark="step 7", seconds=20.0, place=place, is_waiting=is_waiting, host=host)
