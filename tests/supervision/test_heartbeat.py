import socket
import threading
import time
from dataclasses import replace

import pytest
from small_stores import heartbeat, stores

from megalowbit.supervision.heartbeat import HeartbeatThread, NeighbourWatch, StoreSilentError

INTERVAL = 0.1
ANSWER = 3 * INTERVAL


def heartbeat_thread(store, alarmed, **more):
    settings = {"interval": INTERVAL, "seconds_to_answer": ANSWER, **more}
    return HeartbeatThread(store, heartbeat, on_alarm=alarmed.set, **settings)


@pytest.fixture
def pair(monkeypatch):
    """A running thread, the store of another rank, and the event of an alarm."""
    own, other = stores(2, monkeypatch)
    alarmed = threading.Event()
    thread = heartbeat_thread(own, alarmed)
    thread.start()
    yield thread, other, alarmed
    thread.stop(is_done=True)


@pytest.fixture
def unused_port():
    """A port that refuses connections, and that nobody else gets."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


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


def test_an_unresponsive_store_is_abandoned_after_a_time_and_then_at_once(pair):
    thread, _, _ = pair
    release = threading.Event()
    started = time.monotonic()
    with pytest.raises(StoreSilentError, match=r"no answer for 0\.3 s"):
        thread.execute(lambda store: release.wait())
    assert time.monotonic() - started >= ANSWER
    waits = []
    for _ in range(5):
        started = time.monotonic()
        with pytest.raises(StoreSilentError, match="no answer"):
            thread.execute(lambda store: store.heartbeats())
        waits.append(time.monotonic() - started)
    assert min(waits) < ANSWER  # of several, as the machine may be busy
    release.set()


def test_a_late_heartbeat_goes_before_requests_that_wait(monkeypatch):
    (own,) = stores(1, monkeypatch)
    thread = heartbeat_thread(own, threading.Event(), seconds_to_answer=20.0)
    thread.start()
    counts = []

    def read_count(store):
        counts.append(store.heartbeats()[0].count)

    def wait_and_read_count(store):
        second.start()
        time.sleep(2 * INTERVAL)
        read_count(store)

    second = threading.Thread(target=thread.execute, args=(read_count,))
    thread.execute(wait_and_read_count)
    second.join()
    assert counts[1] == counts[0] + 1
    thread.stop(is_done=True)


@pytest.mark.parametrize(("is_of_launcher", "has_ended"), [(False, True), (True, True), (True, False)])
def test_a_broken_connection_ends_the_heartbeats_and_is_an_alarm_unless_the_launcher_has_ended(
    pair, monkeypatch, unused_port, is_of_launcher, has_ended
):
    thread, other, alarmed = pair
    address = thread.store.address._replace(is_main_process=not is_of_launcher)
    if has_ended:
        address = address._replace(number="127.0.0.1", port=unused_port)
    monkeypatch.setattr(thread.store, "address", address)

    def fail(store):
        raise RuntimeError("Broken pipe\nand a long stack")

    assert thread.lost_at is None

    with pytest.raises(StoreSilentError, match=r"^Broken pipe$"):
        thread.execute(fail)
    wait_until(lambda: thread.lost == "Broken pipe")
    last = other.heartbeats()[0].count
    with pytest.raises(StoreSilentError, match=r"^Broken pipe$"):
        thread.execute(lambda store: store.heartbeats())
    time.sleep(3 * INTERVAL)
    assert other.heartbeats()[0].count == last
    if is_of_launcher and has_ended:
        wait_until(lambda: thread.has_lost_launcher)
        assert not alarmed.wait(3 * INTERVAL)
    else:
        assert alarmed.wait(20)  # a port may close a little later than its connections
        assert not thread.has_lost_launcher
    assert 0 < time.monotonic() - thread.lost_at < 600


def watching(monkeypatch, counts, *, limit=10.0, done=()):
    """`look(now)` of rank 0's watch over ranks whose numbers of heartbeats are `counts`."""
    watch = NeighbourWatch(0, len(counts), limit=limit, interval=2.5)

    def read(rank):
        count = counts[rank]
        return None if count is None else replace(heartbeat(count), is_done=rank in done)

    return lambda now: watch.find_silent(read, now)


def test_a_neighbour_is_silent_once_its_heartbeat_has_not_changed_for_the_limit(monkeypatch):
    counts = [1, 1, 1]
    look = watching(monkeypatch, counts)
    assert [look(now) for now in (0.0, 2.5, 5.0)] == [None] * 3
    counts[1] = 2
    assert [look(now) for now in (7.5, 10.0, 12.5, 15.0)] == [None] * 4
    assert look(17.5) == 1


def test_a_watch_that_was_stopped_itself_gives_others_time_to_answer(monkeypatch):
    counts = [1, 1]
    look = watching(monkeypatch, counts)
    assert look(0.0) is None
    assert look(1000.0) is None  # the whole job was stopped and continued
    counts[1] = 2
    assert look(1002.5) is None


def test_ranks_that_have_left_training_are_passed_over(monkeypatch):
    look = watching(monkeypatch, [1, 1, 1], done=(1,))
    assert [look(now) for now in (0.0, 5.0)] == [None, None]
    assert look(10.0) == 2
    assert watching(monkeypatch, [1, 1], done=(1,))(0.0) is None


def test_a_rank_that_has_not_started_is_not_silent(monkeypatch):
    look = watching(monkeypatch, [1, None])
    assert [look(now) for now in (0.0, 5.0, 10.0, 15.0)] == [None] * 4


def test_a_silent_neighbour_raises_the_alarm(monkeypatch):
    own, other = stores(2, monkeypatch)
    other.publish(heartbeat(7))
    alarmed = threading.Event()
    watch = NeighbourWatch(0, 2, limit=3 * INTERVAL, interval=INTERVAL)
    thread = heartbeat_thread(own, alarmed, neighbour_watch=watch)
    thread.start()
    assert alarmed.wait(20)
    assert thread.silent == 1
    thread.stop(is_done=True)
