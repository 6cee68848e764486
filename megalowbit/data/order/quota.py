"""Chooses the source of each sample of a blend: every prefix has the shares to within a sample a source.

The algorithm is Tijdeman's ("The chairman assignment problem", Discrete Mathematics 32, 1980). Source i
should have given T_i(n) of the first n samples, the sum of its shares. Its next sample, after c of them,

    is released   at the first n with T_i(n) − c ≥ 1/(2k−2)
    is due        at the first n with T_i(n) − c > 1 − 1/(2k−2)

and each place gets the released sample that is due first. For k ≥ 2 sources, |T_i(n) − c_i(n)| ≤ 1 − 1/(2k−2)
holds for each i and n; no algorithm has a lower bound. Shares may change with n, if the changes are known in
advance: the due dates depend on them.

All numbers are integers. A choice depends on the shares from here on and on the lags T_i(n) − c_i(n) alone.
Thus n and the counts are the whole state, and with constant shares of a small common denominator the choices
recur: these are kept in blocks, and later ones are copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

NEVER = 2**62
LONGEST_PERIOD = 2**14  # places; blocks of longer periods would take long to find
BLOCK = 2**12  # places in a block of short periods

Sources = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Constant shares, from a sample on until the next segment.

    Attributes:
        start: the number of the first sample.
        weights: one integer ≥ 0 for each source; the share is the weight ÷ the sum of the weights.
    """

    start: int
    weights: tuple[int, ...]


def check_segments(segments: Sequence[Segment]) -> None:
    """Check what the functions below rely on.

    Raises:
        ValueError: segments are not in order, or their weights are not integers ≥ 0 with one positive sum.
    """
    if not segments or not segments[0].weights:
        raise ValueError("there must be a segment, and a source in it")
    total = sum(segments[0].weights)
    for each in segments:
        if len(each.weights) != len(segments[0].weights) or sum(each.weights) != total or total < 1:
            raise ValueError(f"weights must have one positive sum: {segments[0].weights}, {each.weights}")
        if min(each.weights) < 0:
            raise ValueError(f"weights must not be negative: {each.weights}")
    starts = [each.start for each in segments]
    if starts[0] < 0 or any(later <= earlier for earlier, later in pairwise(starts)):
        raise ValueError(f"starts must be increasing: {starts}")


def targets(segments: Sequence[Segment], position: int) -> list[int]:
    """T_i(position) × the sum of the weights: the samples since the first segment's start that are due."""
    ends = [*(each.start for each in segments[1:]), position]
    lengths = [max(0, min(end, position) - each.start) for each, end in zip(segments, ends, strict=True)]
    pairs = list(zip(segments, lengths, strict=True))
    return [
        sum(each.weights[source] * length for each, length in pairs)
        for source in range(len(segments[0].weights))
    ]


def is_within_quota(segments: Sequence[Segment], position: int, counts: Sequence[int]) -> bool:
    """Whether the algorithm may have come to these counts: the sum is right, and each is near its target."""
    total, room = sum(segments[0].weights), _room(len(counts))
    return sum(counts) == position - segments[0].start and all(
        room * abs(target - count * total) <= (room - 1) * total
        for target, count in zip(targets(segments, position), counts, strict=True)
    )


def _room(num_sources: int) -> int:
    """2k − 2, of the bound 1 − 1/(2k−2); one source needs none, and has what two would have."""
    return max(2 * num_sources - 2, 2)


class QuotaOrder:
    """The sources of the samples from a position on.

    Args:
        segments: shares, see `check_segments`. The last ones hold for ever.
        position: the number of the next sample, at least the start of the first segment.
        counts: samples that each source has given since the start of the first segment.

    Raises:
        ValueError: the segments are not valid, or the algorithm cannot have come to these counts.
    """

    def __init__(self, segments: Sequence[Segment], position: int, counts: Sequence[int]) -> None:
        check_segments(segments)
        if position < segments[0].start or not is_within_quota(segments, position, counts):
            raise ValueError(f"counts {list(counts)} do not fit position {position} of {list(segments)}")
        self._segments, self._total = tuple(segments), sum(segments[0].weights)
        self._room = _room(len(counts))
        self._lines = [self._lines_of(source) for source in range(len(counts))]
        self._blocks: dict[tuple[int, ...], Sources] = {}
        # choices from `_start` on, of which `_offset` are taken; `_counts` are those at `_start`
        self._block, self._start, self._counts = np.empty(0, np.int64), position, list(counts)
        self._offset = 0
        self._queues_are_at = -1  # the position that the queues of `_choose` belong to

    @property
    def position(self) -> int:
        """The number of the next sample."""
        return self._start + self._offset

    @property
    def counts(self) -> list[int]:
        """Samples that each source has given since the start of the first segment."""
        taken = np.bincount(self._block[: self._offset], minlength=len(self._counts))
        return [count + more for count, more in zip(self._counts, taken.tolist(), strict=True)]

    def take(self, count: int) -> Sources:
        """The sources of the next `count` samples, (count,)."""
        parts = [np.empty(0, np.int64)]
        while count:
            if self._offset == len(self._block):
                self._next_block(count)
            part = self._block[self._offset : self._offset + count]
            self._offset += len(part)
            count -= len(part)
            parts.append(part)
        return np.concatenate(parts)

    def _next_block(self, count: int) -> None:
        """Go on to the next block: one that recurs, or `count` choices."""
        self._counts, self._start, self._offset = self.counts, self.position, 0
        length, key = self._recurring()
        if key is None:
            self._block = self._choose(count)
            return
        if key not in self._blocks:
            self._blocks[key] = self._choose(length)
        self._block = self._blocks[key]

    def _recurring(self) -> tuple[int, tuple[int, ...] | None]:
        """The length and name of the block that begins here, if it depends on the current shares alone."""
        if self._total > LONGEST_PERIOD:
            return 0, None
        length = self._total * max(1, BLOCK // self._total)
        place = bisect_right([each.start for each in self._segments], self._start) - 1
        if place + 1 < len(self._segments):
            # a sample is due at most two periods of its source after the one before it is due
            reach = max(-(-2 * self._total // each) for each in self._segments[place].weights if each)
            if self._start + length + reach >= self._segments[place + 1].start:
                return 0, None
        at = targets(self._segments, self._start)
        lags = (target - count * self._total for target, count in zip(at, self._counts, strict=True))
        return length, (place, *lags)

    def _choose(self, length: int) -> Sources:
        """The next `length` choices by the algorithm."""
        if self._queues_are_at != self._start:
            self._given, self._lines_at = list(self._counts), [0] * len(self._counts)
            self._ready: list[tuple[int, int]] = []  # (due, source)
            self._waiting: list[tuple[int, int, int]] = []  # (released, due, source)
            for source in range(len(self._counts)):
                self._await(source)
        waiting, ready, given = self._waiting, self._ready, self._given
        chosen = np.empty(length, np.int64)
        for place in range(length):
            now = self._start + place + 1
            while waiting and waiting[0][0] <= now:
                _, due, source = heappop(waiting)
                heappush(ready, (due, source))
            _, source = heappop(ready)
            chosen[place] = source
            given[source] += 1
            self._await(source)
        self._queues_are_at = self._start + length
        return chosen

    def _await(self, source: int) -> None:
        """Queue the next sample of a source."""
        line, total = self._lines_at[source], self._total
        goal = (self._room * self._given[source] + 1) * total
        released, line = self._first(source, line, goal)
        self._lines_at[source] = line
        if released < NEVER:
            due, _ = self._first(source, line, goal + (self._room - 2) * total + 1)
            heappush(self._waiting, (released, due, source))

    def _lines_of(self, source: int) -> list[tuple[int, int, int, int]]:
        """Target × `_room` of a source as lines: first and last position, value at the first, and slope."""
        lines, value = [], 0
        ends = [*(each.start for each in self._segments[1:]), NEVER]
        for each, end in zip(self._segments, ends, strict=True):
            slope = self._room * each.weights[source]
            lines.append((each.start, end, value, slope))
            value += slope * (end - each.start)
        return lines

    def _first(self, source: int, line: int, goal: int) -> tuple[int, int]:
        """The first position, not before that line, at which target × `_room` is ≥ goal; and its line."""
        for place in range(line, len(self._segments)):
            start, end, value, slope = self._lines[source][place]
            if value >= goal:
                return start, place
            if slope:
                position = start - (value - goal) // slope  # rounded up
                if position <= end:
                    return position, place
        return NEVER, len(self._segments) - 1
