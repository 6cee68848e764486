import socket
import threading
import time

import pytest
from small_stores import heartbeat, stores

from megalowbit.supervision import heartbeat_store as heartbeat_store
from megalowbit.supervision.heartbeat_store import (
    DEFECT,
    DIAGNOSES,
    LOSS,
    MISTAKE,
    REPORTS_SIGTERM,
    FailureReport,
    HeartbeatStore,
    PublishedDiagnosis,
)

FAILURE = FailureReport(1, "n2", "step 7", "ValueError: a defect", DEFECT)


def test_any_rank_reads_all_heartbeats(monkeypatch):
    first, second, third = stores(3, monkeypatch)
    assert first.heartbeats() == {}
    first.publish(heartbeat(1))
    third.publish(heartbeat(5, host="n3"))
    assert second.heartbeats() == {0: heartbeat(1), 2: heartbeat(5, host="n3")}
    third.publish(heartbeat(6, host="n3"))
    assert second.snapshot({2: heartbeat(5)}).silent == [1]


def test_heartbeats_of_many_ranks_are_read_though_some_are_missing(monkeypatch):
    monkeypatch.setattr(heartbeat_store, "KEYS_A_REQUEST", 3)
    opened = stores(11, monkeypatch)
    present = [0, 2, 3, 4, 5, 9]  # one of a request missing, none, all, and the last request shorter
    for rank in present:
        opened[rank].publish(heartbeat(rank))
    assert opened[1].heartbeats() == {rank: heartbeat(rank) for rank in present}


def test_one_rank_gets_each_claim(monkeypatch):
    first, second = stores(2, monkeypatch)
    assert first.claimed_by(DIAGNOSES) is None
    assert second.claim(DIAGNOSES)
    assert not first.claim(DIAGNOSES)
    assert first.claimed_by(DIAGNOSES) == 1
    assert second.claim(DIAGNOSES)  # again
    assert first.claim(REPORTS_SIGTERM)


def test_a_reported_failure_alarms_all_ranks_and_the_first_one_is_kept(monkeypatch):
    first, second = stores(2, monkeypatch)
    assert not first.is_alarmed()
    assert first.failure() is None
    second.report(FAILURE)
    first.report(FailureReport(0, "n1", "step 7", "another", MISTAKE))
    assert first.is_alarmed()
    assert first.failure() == FAILURE
    assert str(FAILURE).startswith("rank 1 (host n2) failed in step 7: ValueError: a defect")


def test_waiting_ends_once_all_live_ranks_have_read_or_reported(monkeypatch):
    first, second, third = stores(3, monkeypatch)
    second.report(FAILURE)
    assert not first.is_read_by_all()
    first.publish_diagnosis(PublishedDiagnosis("found", LOSS, 3))
    assert not first.is_read_by_all()
    assert third.read_diagnosis() == PublishedDiagnosis("found", LOSS, 3)
    assert first.is_read_by_all()


def test_lost_ranks_are_not_waited_for(monkeypatch):
    first, _, third = stores(3, monkeypatch)
    first.publish_diagnosis(PublishedDiagnosis("found", LOSS, 2))
    assert not first.is_read_by_all()
    third.read_diagnosis()
    assert first.is_read_by_all()


def test_nothing_is_waited_for_once_all_ranks_have_reported(monkeypatch):
    first, second = stores(2, monkeypatch)
    first.report(FAILURE)
    second.report(FAILURE)
    assert first.is_read_by_all()


@pytest.mark.slow
def test_a_second_loop_of_the_same_process_starts_with_an_empty_store(monkeypatch):
    first, second = stores(2, monkeypatch)
    second.report(FAILURE)
    again = [HeartbeatStore(rank, 2) for rank in (0, 1)]
    again[0].publish(heartbeat(1))
    assert again[1].heartbeats() == {0: heartbeat(1)}
    assert not again[0].is_alarmed()
    assert first.is_alarmed()


def test_store_entries_end_with_the_main_process_unless_the_launcher_serves_them(monkeypatch):
    first, second = stores(2, monkeypatch)
    assert first.is_hosted_here
    assert not second.is_hosted_here
    assert str(first.address).startswith("127.0.0.1:")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first, _ = stores(2, monkeypatch)
    assert not first.is_hosted_here


@pytest.mark.parametrize(("closes_after", "is_closed"), [(0.0, True), (0.5, True), (60.0, False)])
def test_a_port_that_closes_after_its_connections_counts_as_closed(monkeypatch, closes_after, is_closed):
    address = stores(1, monkeypatch)[0].address
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = address._replace(number="127.0.0.1", port=server.getsockname()[1])
        closing = threading.Timer(closes_after, server.close)
        closing.start()
        began = time.monotonic()
        assert other.closes_within(2.0) == is_closed
        closing.cancel()
    assert is_closed or time.monotonic() - began >= 2.0
    assert other.closes_within(0.0)


def test_a_machine_that_cannot_be_reached_is_no_closed_port(monkeypatch):
    address = stores(1, monkeypatch)[0].address._replace(number="255.255.255.255")  # no host's
    assert not address.closes_within(60.0)
