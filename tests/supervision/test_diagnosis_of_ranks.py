import threading
import time

import pytest
from small_boards import beat, boards

from megalowbit.supervision.heartbeat import Heartbeat
from megalowbit.supervision.heartbeat_store import DEFECT, LOOKS, LOSS, MISTAKE, Failure, Finding
from megalowbit.supervision.shared_diagnosis import inquire, wait_until_known

INTERVAL = 0.2
REDUCE = "all_reduce (a.py:1 f)"


@pytest.fixture
def start(monkeypatch):
    """`start(count, beating) -> ({rank: heartbeat}, boards)`: ranks of one process, of which some beat."""
    started = []

    def begin(count, beating, describe=beat):
        notes = boards(count, monkeypatch)
        hearts = {}
        for rank in beating:
            describe_rank = describe if rank == 0 else beat
            hearts[rank] = Heartbeat(notes[rank], describe_rank, interval=INTERVAL, at_alarm=lambda: None)
            hearts[rank].start()
        started.extend(hearts.values())
        return hearts, notes

    yield begin
    for heartbeat in started:
        heartbeat.stop(is_done=True)


def ask(heartbeat, rank, results):
    results[rank] = inquire(heartbeat, lambda: beat(0), rank=rank)
    wait_until_known(heartbeat)


def ask_all(hearts):
    """What each finds out when all ask at the same time, and how long it took in intervals."""
    results, started = {}, time.monotonic()
    threads = [threading.Thread(target=ask, args=(each, rank, results)) for rank, each in hearts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, (time.monotonic() - started) / INTERVAL


def test_one_looks_and_all_know_the_same(start):
    hearts, notes = start(4, beating=(0, 1, 3))
    notes[2].publish(beat(5, host="n2"))
    verdicts, _ = ask_all(hearts)
    assert sum(verdict.is_mine for verdict in verdicts.values()) == 1
    (line,) = {verdict.line for verdict in verdicts.values()}
    assert line.startswith("rank 2 (host n2) does not answer: silent since step 7 ")
    assert f"waited 20 s in {REDUCE}" in line
    assert notes[2].is_alarmed()


def test_a_reported_failure_is_found_without_waiting_for_beats(start):
    hearts, notes = start(3, beating=(0, 1))
    notes[2].report(Failure(2, "n2", "step 7", "mend data.corpus", MISTAKE))
    verdicts, intervals = ask_all(hearts)
    assert {verdict.line for verdict in verdicts.values()} == {
        "rank 2 (host n2) failed in step 7: mend data.corpus"
    }
    assert all(verdict.kind == MISTAKE for verdict in verdicts.values())
    assert intervals < 2.5


def test_a_failure_that_is_reported_during_the_search_ends_it(start):
    hearts, notes = start(2, beating=(0,))
    failure = Failure(1, "n2", "step 7", "ValueError: x", DEFECT)
    threading.Timer(INTERVAL, lambda: notes[1].report(failure)).start()
    assert inquire(hearts[0], lambda: beat(0), rank=0).line == str(failure)


def test_a_rank_that_hangs_is_marked_as_worth_a_stack(start):
    hearts, _ = start(2, (0, 1), lambda count: beat(count, place="loader.py:3 read", is_waiting=False))
    verdict = inquire(hearts[1], lambda: beat(0), rank=1)
    assert verdict.is_hang
    assert verdict.line.startswith("rank 0 (host n1) hangs since step 7: is in loader.py:3 read; rank 1 ")


def test_if_the_one_that_looks_ends_too_the_others_do_not_wait_for_ever(start):
    hearts, notes = start(3, beating=(1,))
    assert notes[2].claim(LOOKS)
    verdict = inquire(hearts[1], lambda: beat(0), rank=1)
    assert verdict.is_mine
    assert verdict.line == (
        "rank 2 was to find out why the run stands still, and has ended; "
        f"rank 1 (host n1) waited 20 s in {REDUCE} since step 7"
    )


def silenced(heartbeat, board, address=None):
    """The heartbeat with a connection that has ended, to another address if given."""
    if address is not None:
        board.address = address

    def end(board):
        raise RuntimeError("Broken pipe")

    with pytest.raises(RuntimeError):
        heartbeat.ask(end)
    while heartbeat.lost is None:
        time.sleep(0.01)
    return inquire(heartbeat, lambda: beat(0, host="n2"), rank=1).line


def test_a_lost_store_names_the_main_process(start):
    hearts, notes = start(2, beating=(1,))
    line = silenced(hearts[1], notes[1])
    assert line == (
        f"the main process (rank 0, at {notes[1].address}) has ended: it has closed its connections; "
        f"rank 1 (host n2) waited 20 s in {REDUCE} since step 7"
    )


def test_a_refused_connection_is_a_process_that_has_ended(start):
    hearts, notes = start(2, beating=(1,))
    address = notes[1].address._replace(port=1)  # nobody listens there
    line = silenced(hearts[1], notes[1], address)
    assert line.startswith(
        "the main process (rank 0, at 127.0.0.1:1) has ended: its port refuses connections; "
    )


def test_no_way_to_the_machine_is_a_network_that_is_cut(start):
    hearts, notes = start(2, beating=(1,))
    address = notes[1].address._replace(number="255.255.255.255", is_main_process=False)  # no host's
    line = silenced(hearts[1], notes[1], address)
    assert line.startswith("the launcher's store (at 127.0.0.1:")
    assert "cannot be reached (" in line
    assert "): this machine (host n2) or that one is down or cut off the network; rank 1 " in line


def test_the_main_process_waits_for_the_others_to_read_but_not_for_ever(start):
    waits = []
    for _ in range(3):  # on a busy machine one may take longer
        hearts, notes = start(2, beating=(0, 1))
        notes[0].tell(Finding("found", LOSS, 2))
        started = time.monotonic()
        threading.Timer(INTERVAL, notes[1].finding).start()
        wait_until_known(hearts[0])
        waits.append(time.monotonic() - started)
        wait_until_known(hearts[1])  # notes do not end with it
    assert INTERVAL <= min(waits) < 2.4 * INTERVAL


def test_the_main_process_does_not_wait_for_ever(start):
    hearts, notes = start(2, beating=(0,))
    notes[0].tell(Finding("found", LOSS, 2))
    started = time.monotonic()
    wait_until_known(hearts[0])
    assert 2.5 * INTERVAL <= time.monotonic() - started < 10
