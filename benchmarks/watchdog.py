"""What the watchdog costs a run: a mark, a beat, and what one rank reads of all when something has failed.

    python benchmarks/watchdog.py
    python benchmarks/watchdog.py --ranks 1000

One process plays all ranks, over a real store of its own. So nobody else asks the store at the same time, and
no network is in the times: over one, a request for each note would cost a round trip each, which is why there
is none. Times are medians of the rounds.
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

MARKS, BEATS = 20_000, 200  # calls a round


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def print_rows(title: str, times: dict[str, list[float]], peer: str, calls: int, unit: float) -> None:
    """Median per call in units of so many seconds, and its ratio to the peer."""
    print(title)
    for name, values in times.items():
        amount = statistics.median(values) / calls / unit
        print(f"  {name:<34}{amount:10.3g}  {ratio(times, name, peer):6.2f} × {peer}")


def per_step_and_beat(rounds: int) -> Heartbeat:
    """Print both; a beat as it is sent."""
    with Watchdog(WatchdogSettings(), ProcessIdentity()) as watchdog:
        marks: dict[str, Callable[[], object]] = {
            "time.monotonic()": repeated(time.monotonic, MARKS),
            "mark": repeated(lambda: watchdog.mark("step 123456"), MARKS),
        }
        print_rows("every step, µs", interleaved(marks, rounds, "cpu"), "time.monotonic()", MARKS, 1e-6)
        store = HeartbeatStore(0, 1)
        note = watchdog._describe(123456)

        def beat() -> None:
            store.publish(watchdog._describe(123456))
            store.is_alarmed()

        beats: dict[str, Callable[[], object]] = {
            "one write": repeated(lambda: store.publish(note), BEATS),
            "beat": repeated(beat, BEATS),
        }
        print_rows("every 5 s, µs", interleaved(beats, rounds, "cpu"), "one write", BEATS, 1e-6)
    return note


def reading(note: Heartbeat, ranks: int, rounds: int) -> None:
    """Print what the rank that looks into a failure takes to read the notes of all."""
    store = HeartbeatStore(0, ranks)
    keys = [f"heartbeat/{rank}" for rank in range(ranks)]
    for key in keys:
        store._store.set(key, note.to_text())
    assert len(store.heartbeats()) == ranks
    ways: dict[str, Callable[[], object]] = {
        "a request for each": lambda: [Heartbeat.from_text(store._store.get(key)) for key in keys],
        "notes of all": store.heartbeats,
    }
    times = interleaved(ways, rounds, "cpu")
    print_rows(f"when something has failed, {ranks:,} ranks, s", times, "a request for each", 1, 1.0)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--ranks", type=positive, default=16_384)
    arguments = options.parse_args()
    start_process_group()
    note = per_step_and_beat(arguments.rounds)
    print(f"a note: {len(note.to_text().encode())} bytes")
    reading(note, arguments.ranks, min(arguments.rounds, 3))


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
