"""The only thread that uses the store: publishes heartbeats, notices alarms, runs requests with a time limit.

While the network is down, requests to the store block in C, where nothing can interrupt them. Other threads
therefore hand their requests to this thread and wait for a limited time; if no result comes, they get a
`StoreSilentError`. A heartbeat costs one small write and one read of the alarm. Training steps
add no cost.

With each heartbeat, a rank also reads that of one other rank, the next one that has not left training
(`NeighbourWatch`). NCCL does not notice that a peer is gone, so a lost rank is found here, and a lost node by
the rank before its first one. A rank that has lost the store raises the alarm, too, unless the store has
ended with the launcher: the ranks of a killed launcher may be healthy.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # Python 3.10 has two of that name
from functools import partial
from typing import Any, TypeVar, cast

from megalowbit.supervision.heartbeat_store import SECONDS_TO_CLOSE, Heartbeat, HeartbeatStore

T = TypeVar("T")
Request = tuple[Callable[[HeartbeatStore], Any], "Future[Any]"]


class StoreSilentError(RuntimeError):
    """The store did not answer in time, or its connection was closed."""


class NeighbourWatch:
    """Notices that the next rank that has not left training is silent.

    Time counts only while this rank itself looks: if the whole job was stopped and continued, all ranks get
    the time to publish a new heartbeat.
    """

    def __init__(self, rank: int, world_size: int, *, limit: float, interval: float) -> None:
        """Create the watch of `rank`: silence for `limit` seconds is reported; it looks each `interval`."""
        self._ranks = deque((rank + offset) % world_size for offset in range(1, world_size))
        self._limit, self._longest_look = limit, 2 * interval
        self._count: int | None = None
        self._silence, self._looked = 0.0, 0.0

    def find_silent(self, read: Callable[[int], Heartbeat | None], now: float) -> int | None:
        """The neighbour, if it has been silent for too long; `read` returns a rank's heartbeat.

        A neighbour without a first heartbeat is not silent yet: it may still be starting.
        """
        while self._ranks:
            heartbeat = read(self._ranks[0])
            if heartbeat is None:
                return None
            if not heartbeat.is_done:
                break
            self._ranks.popleft()
            self._count = None
        else:
            return None
        if heartbeat.count != self._count:
            self._count, self._silence = heartbeat.count, 0.0
        else:
            self._silence += min(now - self._looked, self._longest_look)
        self._looked = now
        return self._ranks[0] if self._silence >= self._limit else None


class HeartbeatThread:
    """Publishes the heartbeats of one rank, from `start` to `stop`.

    Attributes:
        lost: why the connection to the store was closed; None while it is open.
        lost_at: when that was noticed (`time.monotonic`).
        has_lost_launcher: the store was the launcher's and has ended with it.
        silent: the rank whose silence has raised the alarm, if any.
    """

    def __init__(
        self,
        store: HeartbeatStore,
        describe: Callable[[int], Heartbeat],
        *,
        interval: float,
        seconds_to_answer: float,
        on_alarm: Callable[[], None],
        neighbour_watch: NeighbourWatch | None = None,
    ) -> None:
        """Create the thread.

        Args:
            store: used by this thread only from now on.
            describe: returns the heartbeat with a given number; called in the thread.
            interval: seconds between heartbeats.
            seconds_to_answer: after which a request to the store has failed; at least two intervals.
            on_alarm: called in the thread, once, when another rank has raised an alarm or is silent, or the
                connection to the store is lost, unless the launcher has ended.
            neighbour_watch: looks for a silent rank with each heartbeat; None: nothing does.
        """
        self.store = store
        self.interval, self.seconds_to_answer = interval, seconds_to_answer
        self._describe, self._on_alarm, self._neighbour_watch = describe, on_alarm, neighbour_watch
        self._count, self._has_alarmed = 0, False
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self.silent: int | None = None
        self.lost: str | None = None
        self.lost_at: float | None = None
        self.has_lost_launcher = False
        self._thread = threading.Thread(target=self._run, name="megalowbit-heartbeat", daemon=True)

    def start(self) -> None:
        """Publish the first heartbeat before returning, then more in the background."""
        self._publish()
        self._thread.start()

    def stop(self, *, is_done: bool) -> None:
        """Publish a last heartbeat and end; if `is_done`, wait for that, `seconds_to_answer` at most."""
        self._requests.put(None)
        if is_done:
            self._thread.join(self.seconds_to_answer)

    def execute(self, request: Callable[[HeartbeatStore], T]) -> T:
        """Run a short request in the thread and return its result, within `seconds_to_answer`.

        Raises:
            StoreSilentError: no result came in time.
        """
        limit = self.seconds_to_answer
        since = self._busy_since
        if since is not None:  # a request already hangs: subtract the time it has taken
            limit = max(0.0, limit - (time.monotonic() - since))
        if self.lost is not None:
            raise StoreSilentError(self.lost)
        future: Future[Any] = Future()
        self._requests.put((request, future))
        try:
            return cast("T", future.result(limit))
        except FutureTimeout:
            raise StoreSilentError(f"no answer for {self.seconds_to_answer:.1f} s") from None
        except RuntimeError as error:  # the connection was closed
            raise StoreSilentError(_first_line(error)) from error

    def _run(self) -> None:
        due = time.monotonic() + self.interval
        while self.lost is None:
            if time.monotonic() >= due:  # before any request: a late heartbeat would look like silence
                self._safely(self._publish)
                due = time.monotonic() + self.interval
                continue
            try:
                request = self._requests.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            if request is None:
                self._safely(self._publish)
                return
            self._safely(partial(_answer, *request, self.store))

    def _safely(self, work: Callable[[], None]) -> None:
        """Run `work`; remember the error of a broken connection, which later requests would repeat."""
        self._busy_since = time.monotonic()
        try:
            work()
        except RuntimeError as error:
            self.lost_at, self.lost = time.monotonic(), _first_line(error)
            address = self.store.address
            if address is not None and not address.is_main_process:
                self.has_lost_launcher = address.closes_within(SECONDS_TO_CLOSE)
            if not self.has_lost_launcher:
                self._alarm()
        finally:
            self._busy_since = None

    @property
    def busy_seconds(self) -> float:
        """How long the present request to the store has taken; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _publish(self) -> None:
        self._count += 1
        self.store.publish(self._describe(self._count))
        if not self._has_alarmed and (self.store.is_alarmed() or self._is_neighbour_silent()):
            self._alarm()

    def _is_neighbour_silent(self) -> bool:
        if self._neighbour_watch is not None:
            self.silent = self._neighbour_watch.find_silent(self.store.heartbeat, time.monotonic())
        return self.silent is not None

    def _alarm(self) -> None:
        if not self._has_alarmed:
            self._has_alarmed = True
            self._on_alarm()


def _answer(run: Callable[[HeartbeatStore], Any], future: Future[Any], store: HeartbeatStore) -> None:
    try:
        future.set_result(run(store))
    except RuntimeError as error:
        future.set_exception(error)
        raise


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
