"""Down-sampling that loses no spike: the lowest and the highest value of each bin of steps.

A curve with more points than a picture has columns is divided into bins of equal width. `extremes` keeps the
lowest and the highest value of each, in the order in which they occur, so that a line through them covers
what a line through all points would. `running_mean` smooths over steps, before any down-sampling.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
BINS = 900  # columns of a picture; twice as many points are drawn


def extremes(x: Numbers, y: Numbers, bins: int = BINS) -> tuple[Numbers, Numbers]:
    """The lowest and the highest point of each bin, in order; all points if there are no more than that.

    Args:
        x: (points,), ascending.
        y: (points,), finite.
        bins: number of bins between the first and the last x.

    Returns:
        x and y of the points that are kept.
    """
    if len(x) <= 2 * bins:
        return x, y
    starts = _starts(x, bins)
    lowest, highest = _arg_extreme(y, starts, -1.0), _arg_extreme(y, starts, 1.0)
    kept = np.unique(np.concatenate([lowest, highest, [0, len(x) - 1]]))
    return x[kept], y[kept]


def thinned(x: Numbers, y: Numbers, bins: int = BINS) -> tuple[Numbers, Numbers]:
    """The last point of each bin: for curves that are smooth already."""
    if len(x) <= bins:
        return x, y
    ends = np.append(_starts(x, bins)[1:] - 1, len(x) - 1)
    kept = np.unique(np.concatenate([[0], ends]))
    return x[kept], y[kept]


def bin_means(x: Numbers, y: Numbers, bins: int = BINS) -> tuple[Numbers, Numbers]:
    """The mean of each bin, at its first x: for shares, whose sum stays 1.

    `y` is (…, points), averaged along its last axis.
    """
    if len(x) <= bins:
        return x, y
    starts = _starts(x, bins)
    sizes = np.diff(np.append(starts, len(x)))
    return x[starts], np.add.reduceat(y, starts, axis=-1) / sizes


def places(x: Numbers, bins: int = BINS) -> Numbers:
    """The first x of each bin that has one: where to draw marks of events."""
    return x if len(x) <= bins else x[_starts(x, bins)]


def running_mean(y: Numbers, window: int) -> Numbers:
    """The mean of each value and the `window - 1` before it; the first ones have fewer before them."""
    if window <= 1 or not len(y):
        return y
    sums = np.cumsum(np.insert(y, 0, 0.0))
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _starts(x: Numbers, bins: int) -> NDArray[np.intp]:
    """Index of the first point of each bin that has points."""
    width = (x[-1] - x[0]) or 1.0
    number = np.minimum(((x - x[0]) * bins / width).astype(np.intp), bins - 1)
    return np.flatnonzero(np.diff(number, prepend=-1))


def _arg_extreme(y: Numbers, starts: NDArray[np.intp], sign: float) -> NDArray[np.intp]:
    """Index of the first highest (sign 1) or lowest (-1) value of each bin."""
    signed = sign * y
    peaks = np.maximum.reduceat(signed, starts)
    sizes = np.diff(np.append(starts, len(y)))
    is_peak = np.flatnonzero(signed == np.repeat(peaks, sizes))
    bin_of = np.repeat(np.arange(len(starts)), sizes)[is_peak]
    first = np.flatnonzero(np.diff(bin_of, prepend=-1))
    return is_peak[first]
