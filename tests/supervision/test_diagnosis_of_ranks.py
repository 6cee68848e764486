import threading
import time

import pytest
from small_stores import heartbeat, stores

from megalowbit.errors import LOST
from megalowbit.supervision.diagnosis import diagnose_together, wait_for_readers
from megalowbit.supervision.heartbeat import HeartbeatThread
from megalowbit.supervision.heartbeat_store import (
    DEFECT,
    DIAGNOSES,
    LOSS,
    MISTAKE,
    FailureReport,
    PublishedDiagnosis,
)

INTERVAL = 0.2
ANSWER = 2 * INTERVAL
REDUCE = "all_reduce (a.py:1 f)"


@pytest.fixture
def start(monkeypatch):
    """`start(count, beating) -> ({rank: thread}, stores)`: ranks of one process, of which some beat."""
    started = []

    def begin(count, beating, describe=heartbeat, seconds_to_answer=ANSWER):
        opened = stores(count, monkeypatch)
        hearts = {}
        for rank in beating:
            describe_rank = describe if rank == 0 else heartbeat
            hearts[rank] = HeartbeatThread(
                opened[rank],
                describe_rank,
                interval=INTERVAL,
                seconds_to_answer=seconds_to_answer,
                on_alarm=lambda: None,
            )
            hearts[rank].start()
        started.extend(hearts.values())
        return hearts, opened

    yield begin
    for thread in started:
        thread.stop(is_done=True)


def ask(thread, rank, results):
    results[rank] = diagnose_together(thread, lambda: heartbeat(0), rank=rank)
    wait_for_readers(thread)


def ask_all(hearts):
    """What each finds out when all ask at the same time, and how long it took in intervals."""
    results, started = {}, time.monotonic()
    threads = [threading.Thread(target=ask, args=(each, rank, results)) for rank, each in hearts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, (time.monotonic() - started) / INTERVAL


def test_one_rank_diagnoses_and_all_ranks_get_the_result(start):
    hearts, opened = start(4, beating=(0, 1, 3))
    opened[2].publish(heartbeat(5, host="n2"))
    diagnoses, _ = ask_all(hearts)
    assert sum(diagnosis.is_local for diagnosis in diagnoses.values()) == 1
    (line,) = {diagnosis.line for diagnosis in diagnoses.values()}
    assert line.startswith("rank 2 (host n2) does not answer: silent since step 7 ")
    assert {(each.fault, each.culprit) for each in diagnoses.values()} == {(LOST, "rank 2 (host n2)")}
    assert f"waited 20 s in {REDUCE}" in line
    assert opened[2].is_alarmed()


def test_a_reported_failure_is_found_without_waiting_for_heartbeats(start):
    hearts, opened = start(3, beating=(0, 1))
    opened[2].report(FailureReport(2, "n2", "step 7", "mend data.corpus", MISTAKE))
    diagnoses, intervals = ask_all(hearts)
    assert {diagnosis.line for diagnosis in diagnoses.values()} == {
        "rank 2 (host n2) failed in step 7: mend data.corpus"
    }
    assert all(diagnosis.kind == MISTAKE for diagnosis in diagnoses.values())
    assert intervals < 2.5


def test_a_failure_that_is_reported_during_the_search_ends_it(start):
    hearts, opened = start(2, beating=(0,))
    failure = FailureReport(1, "n2", "step 7", "ValueError: x", DEFECT)
    threading.Timer(INTERVAL, lambda: opened[1].report(failure)).start()
    assert diagnose_together(hearts[0], lambda: heartbeat(0), rank=0).line == str(failure)


def test_a_hung_rank_is_diagnosed_as_a_hang(start):
    hearts, _ = start(2, (0, 1), lambda count: heartbeat(count, place="loader.py:3 read", is_waiting=False))
    diagnosis = diagnose_together(hearts[1], lambda: heartbeat(0), rank=1)
    assert diagnosis.is_hang
    assert diagnosis.line.startswith("rank 0 (host n1) has hung since step 7, in loader.py:3 read; rank 1 ")


def test_a_store_that_answers_slowly_is_not_lost(start):
    """Each request takes longer than two heartbeat intervals; the lost rank is named all the same."""
    hearts, opened = start(3, beating=(0, 1), seconds_to_answer=20.0)
    opened[2].publish(heartbeat(5, host="n2"))
    for rank in (0, 1):
        opened[rank].claim = slowly(opened[rank].claim)
        opened[rank].publish_diagnosis = slowly(opened[rank].publish_diagnosis)
    diagnoses, _ = ask_all(hearts)
    assert all(each.line.startswith("rank 2 (host n2) does not answer: ") for each in diagnoses.values())
    assert sum(each.is_local for each in diagnoses.values()) == 1


def slowly(request):
    def answer(*arguments):
        time.sleep(2.5 * INTERVAL)
        return request(*arguments)

    return answer


def test_ranks_do_not_wait_forever_if_the_diagnosing_rank_ends(start):
    hearts, opened = start(3, beating=(1,))
    assert opened[2].claim(DIAGNOSES)
    diagnosis = diagnose_together(hearts[1], lambda: heartbeat(0), rank=1)
    assert diagnosis.is_local
    assert diagnosis.line == (
        "rank 2 was diagnosing the failure but ended before it finished; "
        f"rank 1 (host n1) waited 20 s in {REDUCE} since step 7"
    )


def silenced(thread, store, address=None):
    """The thread with a connection that has ended, to another address if given."""
    if address is not None:
        store.address = address

    def end(store):
        raise RuntimeError("Broken pipe")

    with pytest.raises(RuntimeError):
        thread.execute(end)
    thread._thread.join(20)  # it ends when it knows why
    return diagnose_together(thread, lambda: heartbeat(0, host="n2"), rank=1)


def test_a_lost_store_names_the_main_process(start):
    hearts, opened = start(2, beating=(1,))
    line = silenced(hearts[1], opened[1]).line
    assert line == (
        f"the main process (rank 0, at {opened[1].address}) has ended: it has closed its connections; "
        f"rank 1 (host n2) waited 20 s in {REDUCE} since step 7"
    )


def test_a_refused_connection_means_that_the_process_has_ended(start):
    hearts, opened = start(2, beating=(1,))
    address = opened[1].address._replace(port=1)  # nobody listens there
    line = silenced(hearts[1], opened[1], address).line
    assert line.startswith(
        "the main process (rank 0, at 127.0.0.1:1) has ended: its port refuses connections; "
    )


def test_the_end_of_the_launcher_is_dated_and_leaves_the_cause_open(start):
    hearts, opened = start(2, beating=(1,))
    address = opened[1].address._replace(port=1, is_main_process=False)
    found = silenced(hearts[1], opened[1], address)
    assert found.line == (
        "the launcher's store (at 127.0.0.1:1) ended 0 s ago: its port refuses connections; "
        f"rank 1 (host n2) waited 20 s in {REDUCE} since step 7"
    )
    assert found.is_open  # the error that was raised follows in the line
    hearts[1].lost_at -= 30
    assert "ended 30 s ago" in diagnose_together(hearts[1], lambda: heartbeat(0), rank=1).line


def test_an_unreachable_host_means_a_network_cut(start):
    hearts, opened = start(2, beating=(1,))
    address = opened[1].address._replace(number="255.255.255.255", is_main_process=False)  # no host's
    line = silenced(hearts[1], opened[1], address).line
    assert line.startswith("the launcher's store (at 127.0.0.1:")
    assert "cannot be reached (" in line
    assert "): this machine (host n2) or that one is down or cut off the network; rank 1 " in line


def test_the_main_process_waits_for_readers_but_not_forever(start):
    waits = []
    for _ in range(3):  # on a busy machine one may take longer
        hearts, opened = start(2, beating=(0, 1))
        opened[0].publish_diagnosis(PublishedDiagnosis("found", LOSS, 2))
        started = time.monotonic()
        threading.Timer(INTERVAL, opened[1].read_diagnosis).start()
        wait_for_readers(hearts[0])
        waits.append(time.monotonic() - started)
        wait_for_readers(hearts[1])  # opened do not end with it
    assert INTERVAL <= min(waits) < 2.4 * INTERVAL


def test_the_main_process_does_not_wait_forever(start):
    hearts, opened = start(2, beating=(0,))
    opened[0].publish_diagnosis(PublishedDiagnosis("found", LOSS, 2))
    started = time.monotonic()
    wait_for_readers(hearts[0])
    assert 2.5 * INTERVAL <= time.monotonic() - started < 10
