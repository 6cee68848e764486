import threading
import time

import pytest
from small_boards import beat, boards

from megalowbit.supervision.heartbeat import Heartbeat, StoreSilentError

INTERVAL = 0.1


@pytest.fixture
def pair(monkeypatch):
    """A running heartbeat, the board of another rank, and the event of an alarm."""
    own, other = boards(2, monkeypatch)
    alarmed = threading.Event()
    heartbeat = Heartbeat(own, beat, interval=INTERVAL, at_alarm=alarmed.set)
    heartbeat.start()
    yield heartbeat, other, alarmed
    heartbeat.stop(is_done=True)


def wait_until(is_true):
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_first_beat_is_there_at_once_and_others_follow(pair):
    _, other, _ = pair
    assert other.beats()[0].count >= 1
    wait_until(lambda: other.beats()[0].count >= 4)


def test_an_alarm_of_another_rank_is_noticed(pair):
    _, other, alarmed = pair
    assert not alarmed.wait(3 * INTERVAL)
    other.raise_alarm()
    assert alarmed.wait(20)


def test_a_request_runs_beside_the_beats(pair):
    heartbeat, other, _ = pair
    other.publish(beat(7))
    assert heartbeat.ask(lambda board: board.beats())[1] == beat(7)


def test_a_last_beat_is_given_at_the_end(pair):
    heartbeat, other, _ = pair
    before = other.beats()[0].count
    heartbeat.stop(is_done=True)
    last = other.beats()[0].count
    assert last > before
    time.sleep(3 * INTERVAL)
    assert other.beats()[0].count == last


def test_a_store_that_does_not_answer_is_given_up_after_two_intervals_and_then_at_once(pair):
    heartbeat, _, _ = pair
    release = threading.Event()
    started = time.monotonic()
    with pytest.raises(StoreSilentError, match=r"no answer for 0\.2 s"):
        heartbeat.ask(lambda board: release.wait())
    assert time.monotonic() - started >= 2 * INTERVAL
    waits = []
    for _ in range(5):
        started = time.monotonic()
        with pytest.raises(StoreSilentError, match="no answer"):
            heartbeat.ask(lambda board: board.beats())
        waits.append(time.monotonic() - started)
    assert min(waits) < 2 * INTERVAL  # of several, as the machine may be busy
    release.set()


def test_a_broken_connection_ends_the_beats_and_is_told(pair):
    heartbeat, other, _ = pair

    def fail(board):
        raise RuntimeError("Broken pipe\nand a long stack")

    with pytest.raises(StoreSilentError, match=r"^Broken pipe$"):
        heartbeat.ask(fail)
    wait_until(lambda: heartbeat.lost == "Broken pipe")
    last = other.beats()[0].count
    with pytest.raises(StoreSilentError, match=r"^Broken pipe$"):
        heartbeat.ask(lambda board: board.beats())
    time.sleep(3 * INTERVAL)
    assert other.beats()[0].count == last
