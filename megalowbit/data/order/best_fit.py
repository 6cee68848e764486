"""Best-fit packing: which documents fill each sample, so that none is cut that fits into one.

Ding et al., "Fewer truncations improve language modeling", arXiv 2404.10830. Documents longer than a sample
are cut into pieces of its length, and a rest. Pieces are placed from the longest to the shortest, each into
the sample with the least room that is enough. Samples with the same room are equal, so pieces of one length
are placed together; the result is that of one after another.

A plan depends on nothing but the lengths. It takes 16 bytes for a piece and 8 for a sample, in a file that is
read through a memory map; making it takes about 60 bytes of memory for a piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCANNED_AT_ONCE = 2**24  # tokens

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class BestFitPlan:
    """Which pieces each sample has.

    Attributes:
        bounds: (samples + 1,); sample i has the pieces bounds[i] … bounds[i + 1] - 1.
        starts: (pieces,), where each piece begins in the tokens.
        lengths: (pieces,), its tokens.
    """

    bounds: Ints
    starts: Ints
    lengths: Ints

    def save(self, path: Path) -> None:
        """Write the plan as one array."""
        sizes = np.array([len(self.bounds), len(self.starts)])
        with path.open("wb") as file:
            np.save(file, np.concatenate([sizes, self.bounds, self.starts, self.lengths]))

    @classmethod
    def load(cls, path: Path) -> BestFitPlan:
        """Read what `save` has written, through a memory map."""
        whole = np.load(path, mmap_mode="r")
        num_bounds, num_pieces = whole[:2].tolist()
        ends = np.cumsum([2, num_bounds, num_pieces, num_pieces]).tolist()
        bounds, starts, lengths = (whole[start:end] for start, end in pairwise(ends))
        return cls(bounds, starts, lengths)


def best_fit_plan(tokens: NDArray[Any], end: int, size: int) -> BestFitPlan:
    """Plan samples of `size` tokens.

    Args:
        tokens: one-dimensional; may be a memory map.
        end: the end-of-document id, the last token of each document; tokens that none follows are not used.
        size: tokens in a sample.
    """
    starts, lengths = _pieces(_document_bounds(tokens, end), size)
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    sample = _place(lengths, size)
    order = np.argsort(sample, kind="stable")
    counts = np.bincount(sample)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return BestFitPlan(bounds, starts[order], lengths[order])


def _document_bounds(tokens: NDArray[Any], end: int) -> Ints:
    """Where documents begin, and where the last one ends; (documents + 1,)."""
    blocks = range(0, len(tokens), SCANNED_AT_ONCE)
    found = [np.flatnonzero(tokens[start : start + SCANNED_AT_ONCE] == end) + start + 1 for start in blocks]
    return np.concatenate([np.zeros(1, np.int64), *found])


def _pieces(bounds: Ints, size: int) -> tuple[Ints, Ints]:
    """Starts and lengths of the documents, those longer than `size` cut."""
    lengths = np.diff(bounds)
    counts = -(-lengths // size)  # pieces of each document
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # within its document
    starts = bounds[document] + number * size
    return starts, np.minimum(lengths[document] - number * size, size)


def _place(lengths: Ints, size: int) -> Ints:
    """The sample of each piece; `lengths` fall."""
    sample = np.empty(len(lengths), np.int64)
    with_room: list[list[Ints]] = [[] for _ in range(size + 1)]  # samples, by their room
    counts = np.zeros(size + 1, np.int64)  # of samples, by their room
    num_samples, first = 0, 0
    values, sizes = np.unique(-lengths, return_counts=True)
    for length, count in zip((-values).tolist(), sizes.tolist(), strict=True):
        stop = first + count
        while first < stop:
            rooms = counts[length:].nonzero()[0]
            room = size if not len(rooms) else length + int(rooms[0])
            each = room // length  # pieces into a sample before the next one with as much room
            needed = -(-(stop - first) // each)
            if len(rooms):
                chosen = np.concatenate(with_room[room])
                chosen, left = chosen[:needed], chosen[needed:]
                with_room[room], counts[room] = [left] if len(left) else [], len(left)
            else:
                chosen = np.arange(num_samples, num_samples + needed)
                num_samples += needed
            placed = min(stop - first, len(chosen) * each)
            sample[first : first + placed] = np.repeat(chosen, each)[:placed]
            first += placed
            full, rest = divmod(placed, each)
            for group, used in ((chosen[:full], each), (chosen[full:], rest)):
                if len(group):
                    with_room[room - used * length].append(group)
                    counts[room - used * length] += len(group)
    return sample
