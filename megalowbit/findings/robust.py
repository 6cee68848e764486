"""Medians and deviations of series of a run, which single bad steps do not change.

All findings that compare numbers use these. A *deviation* is 1.4826 × the median absolute deviation, the
standard deviation of a normal distribution.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MAD_TO_STD = 1.4826


def deviation(values: Array) -> float:
    """The robust standard deviation of (n,) values; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    return float(MAD_TO_STD * np.median(np.abs(values - np.median(values))))


def noise(values: Array) -> float:
    """The robust standard deviation of steps around a trend: of the differences of neighbours, / √2."""
    return deviation(np.diff(values)) / float(np.sqrt(2)) if len(values) > 2 else 0.0


def running_median(values: Array, window: int) -> Array:
    """(n,): the median of each value and up to `window` - 1 values before it."""
    if window <= 1 or len(values) <= 1:
        return values.copy()
    padded = np.concatenate([np.full(window - 1, np.nan), values])
    views = np.lib.stride_tricks.sliding_window_view(padded, window)
    result = np.empty(len(values))
    head = min(window - 1, len(values))
    for place in range(head):
        result[place] = np.median(values[: place + 1])
    # in pieces: the windows of 100,000 steps do not fit into the cache at once
    for start in range(head, len(values), 8192):
        result[start : start + 8192] = np.median(views[start : start + 8192], axis=1)
    return result


def longest_streak(flags: NDArray[np.bool_], allowed: int = 0) -> tuple[int, int]:
    """First place and length of the longest series of true values with up to `allowed` false ones inside.

    A series begins and ends with a true value; (0, 0) if there is none.
    """
    places = np.flatnonzero(flags)
    best, left = (0, 0), 0
    for right in range(len(places)):
        while places[right] - places[left] - (right - left) > allowed:
            left += 1
        length = int(places[right] - places[left]) + 1
        if length > best[1]:
            best = (int(places[left]), length)
    return best
