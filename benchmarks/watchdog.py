"""Cost of the watchdog: a mark, a heartbeat, and one rank reading all heartbeats after a failure.

    python benchmarks/watchdog.py
    python benchmarks/watchdog.py --ranks 1000

One process acts as all ranks, with a real store that only it uses. The times therefore contain no contention
and no network. Over a network, a request for each heartbeat would cost one round trip each; this is why the
watchdog requests many heartbeats at once. Times are medians over the rounds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

from timing import interleaved, parser, positive, ratio

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.engine.process_start import start_process_group
from megalowbit.supervision.heartbeat_store import Heartbeat, HeartbeatStore
from megalowbit.supervision.settings import WatchdogSettings
from megalowbit.supervision.watchdog import Watchdog

MARKS, HEARTBEATS = 20_000, 200  # calls in each round


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def print_rows(title: str, times: dict[str, list[float]], peer: str, calls: int, unit: float) -> None:
    """Print the median time of one call, in multiples of `unit` seconds, and its ratio to the peer."""
    print(title)
    for name, values in times.items():
        amount = statistics.median(values) / calls / unit
        print(f"  {name:<34}{amount:10.3g}  {ratio(times, name, peer):6.2f} × {peer}")


def measure_step_and_heartbeat(rounds: int) -> Heartbeat:
    """Print the cost of a mark and of a heartbeat; returns a heartbeat."""
    with Watchdog(WatchdogSettings(), ProcessIdentity()) as watchdog:
        marks: dict[str, Callable[[], object]] = {
            "time.monotonic()": repeated(time.monotonic, MARKS),
            "mark": repeated(lambda: watchdog.mark("step 123456"), MARKS),
        }
        print_rows("every step, µs", interleaved(marks, rounds, "cpu"), "time.monotonic()", MARKS, 1e-6)
        store = HeartbeatStore(0, 1)
        heartbeat = watchdog._describe(123456)

        def send() -> None:
            store.publish(watchdog._describe(123456))
            store.is_alarmed()

        sends: dict[str, Callable[[], object]] = {
            "one write": repeated(lambda: store.publish(heartbeat), HEARTBEATS),
            "heartbeat": repeated(send, HEARTBEATS),
            "reading the next rank's": repeated(lambda: store.heartbeat(0), HEARTBEATS),
        }
        print_rows("every 2.5 s, µs", interleaved(sends, rounds, "cpu"), "one write", HEARTBEATS, 1e-6)
    return heartbeat


def measure_reading(heartbeat: Heartbeat, ranks: int, rounds: int) -> None:
    """Print how long the rank that makes the diagnosis needs to read the heartbeats of all ranks."""
    store = HeartbeatStore(0, ranks)
    keys = [f"heartbeat/{rank}" for rank in range(ranks)]
    for key in keys:
        store._store.set(key, heartbeat.to_text())
    assert len(store.heartbeats()) == ranks
    candidates: dict[str, Callable[[], object]] = {
        "one request for each": lambda: [Heartbeat.from_text(store._store.get(key)) for key in keys],
        "all heartbeats": store.heartbeats,
    }
    times = interleaved(candidates, rounds, "cpu")
    print_rows(f"after a failure, {ranks:,} ranks, s", times, "one request for each", 1, 1.0)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--ranks", type=positive, default=16_384)
    arguments = options.parse_args()
    start_process_group()
    heartbeat = measure_step_and_heartbeat(arguments.rounds)
    print(f"a heartbeat: {len(heartbeat.to_text().encode())} bytes")
    measure_reading(heartbeat, arguments.ranks, min(arguments.rounds, 3))


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
