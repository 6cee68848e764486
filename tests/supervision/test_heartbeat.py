import threading
import time

import pytest
from small_stores import heartbeat, stores

from megalowbit.supervision.heartbeat import HeartbeatThread, StoreSilentError

INTERVAL = 0.1


@pytest.fixture
def pair(monkeypatch):
    """A running thread, the store of another rank, and the event of an alarm."""
    own, other = stores(2, monkeypatch)
    alarmed = threading.Event()
    thread = HeartbeatThread(own, heartbeat, interval=INTERVAL, on_alarm=alarmed.set)
    thread.start()
    yield thread, other, alarmed
    thread.stop(is_done=True)


def wait_until(is_true):
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_first_heartbeat_is_there_at_once_and_others_follow(pair):
    _, other, _ = pair
    assert other.heartbeats()[0].count >= 1
    wait_until(lambda: other.heartbeats()[0].count >= 4)


def test_an_alarm_of_another_rank_is_noticed(pair):
    _, other, alarmed = pair
    assert not alarmed.wait(3 * INTERVAL)
    other.raise_alarm()
    assert alarmed.wait(20)


def test_a_request_runs_concurrently_with_heartbeats(pair):
    thread, other, _ = pair
    other.publish(heartbeat(7))
    assert thread.execute(lambda store: store.heartbeats())[1] == heartbeat(7)


def test_a_last_heartbeat_is_sent_at_the_end(pair):
    thread, other, _ = pair
    before = other.heartbeats()[0].count
    thread.stop(is_done=True)
    last = other.heartbeats()[0].count
    assert last > before
    time.sleep(3 * INTERVAL)
    assert other.heartbeats()[0].count == last


def test_an_unresponsive_store_is_abandoned_after_two_intervals_and_then_at_once(pair):
    thread, _, _ = pair
    release = threading.Event()
    started = time.monotonic()
    with pytest.raises(StoreSilentError, match=r"no answer for 0\.2 s"):
        thread.execute(lambda store: release.wait())
    assert time.monotonic() - started >= 2 * INTERVAL
    waits = []
    for _ in range(5):
        started = time.monotonic()
        with pytest.raises(StoreSilentError, match="no answer"):
            thread.execute(lambda store: store.heartbeats())
        waits.append(time.monotonic() - started)
    assert min(waits) < 2 * INTERVAL  # of several, as the machine may be busy
    release.set()


def test_a_broken_connection_ends_the_heartbeats_and_is_reported(pair):
    thread, other, _ = pair

    def fail(store):
        raise RuntimeError("Broken pipe\nand a long stack")

    with pytest.raises(StoreSilentError, match=r"^Broken pipe$"):
        thread.execute(fail)
    wait_until(lambda: thread.lost == "Broken pipe")
    last = other.heartbeats()[0].count
    with pytest.raises(StoreSilentError, match=r"^Broken pipe$"):
        thread.execute(lambda store: store.heartbeats())
    time.sleep(3 * INTERVAL)
    assert other.heartbeats()[0].count == last
