"""Errors of rounding to a format's grid under a given scale, from tables that are valid for every tensor.

If a grid is scaled to a largest magnitude M, the error of rounding N(center, sigma²), in units of sigma,
depends only on M/sigma and center/sigma. `rounding_error` computes it exactly but takes 0.1 ms. Here it is
tabulated once for each grid, with `RATIO_STEPS` points per octave and `CENTER_STEPS` per sigma, and its
logarithm is interpolated. Centers beyond `LAST_CENTER` sigmas are rare and computed exactly.

Magnitudes beyond the bulk are modelled as evenly distributed between two numbers: `even_error`.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from megalowbit.formats.element import ELEMENTS
from megalowbit.speculation.noise.rounding import Floats, rounding_error

RATIO_STEPS = 4
RATIO_OCTAVES = 18  # there INT8 has long rounded the whole bulk to zero
CENTER_STEPS = 2
LAST_CENTER = 4.0
EVEN_POINTS = 8192
SMALLEST = 1e-300  # lower bound of errors, because tables hold logarithms


class Grid(NamedTuple):
    """An element format and a rounding mode.

    Attributes:
        element: name of the format, a key of `formats.element.ELEMENTS`; that of INT8 for mixed blocks.
        is_stochastic: stochastic rounding; otherwise to nearest.
    """

    element: str
    is_stochastic: bool


@functools.lru_cache(maxsize=32)
def magnitudes(element: str) -> Floats:
    """The format's non-negative numbers divided by its largest: ascending from 0 to 1."""
    numbers = np.array(ELEMENTS[element].grid, dtype=np.float64)
    return numbers / numbers[-1]


@functools.lru_cache(maxsize=32)
def levels(element: str) -> Floats:
    """All numbers of the format divided by its largest: ascending from -1 to 1."""
    positive = magnitudes(element)
    return np.concatenate([-positive[:0:-1], positive])


def gaussian_error(grid: Grid, absmax: float, sigma: float, center: float) -> float:
    """Mean squared error of a bulk N(center, sigma²) within ±absmax.

    The grid is scaled so that the format's largest number represents `absmax` > 0; sigma may be 0.
    """
    if sigma == 0 or abs(center) > LAST_CENTER * sigma:
        return exact_error(grid, absmax, sigma, center)
    octave = min(max(math.log2(absmax / sigma), 0.0), RATIO_OCTAVES - 1e-9) * RATIO_STEPS
    place = abs(center) / sigma * CENTER_STEPS
    row = min(int(place), int(LAST_CENTER * CENTER_STEPS) - 1)
    near = _between(_row(grid, row), octave)
    value = near + (place - row) * (_between(_row(grid, row + 1), octave) - near) if place else near
    return float(sigma * sigma * 2.0**value)


def exact_error(grid: Grid, absmax: float, sigma: float, center: float) -> float:
    """The same as `gaussian_error`, without tables."""
    bounds = (-absmax, absmax)
    error = rounding_error(
        levels(grid.element) * absmax, sigma, center, is_stochastic=grid.is_stochastic, bounds=bounds
    )
    if math.isnan(error):  # the center is beyond absmax: one of the two estimates is wrong
        return rounding_error(levels(grid.element) * absmax, sigma, center, is_stochastic=grid.is_stochastic)
    return error


def _between(row: tuple[float, ...], place: float) -> float:
    index = int(place)
    return row[index] + (place - index) * (row[index + 1] - row[index])


@functools.lru_cache(maxsize=256)
def _row(grid: Grid, row: int) -> tuple[float, ...]:
    """log₂ of the error of N(row / `CENTER_STEPS`, 1) for M/sigma = 2^(i / `RATIO_STEPS`)."""
    center = row / CENTER_STEPS
    ratios = [2 ** (i / RATIO_STEPS) for i in range(RATIO_OCTAVES * RATIO_STEPS + 1)]
    errors = [exact_error(grid, max(ratio, center), 1.0, center) for ratio in ratios]
    return tuple(math.log2(max(error, SMALLEST)) for error in errors)


def even_error(grid: Grid, absmax: float, least: float) -> float:
    """Mean squared error of magnitudes evenly distributed in [least, absmax]; 0 at absmax itself.

    The grid is scaled so that the format's largest number represents `absmax` > 0.
    """
    place = min(int(least / absmax * EVEN_POINTS), EVEN_POINTS - 1)
    return float(_even_errors(grid)[place]) * absmax * absmax


@functools.lru_cache(maxsize=32)
def _even_errors(grid: Grid) -> Floats:
    """`even_error` at absmax = 1, indexed by `least` in `EVEN_POINTS` steps from 0 to 1."""
    numbers = magnitudes(grid.element)
    points = (np.arange(EVEN_POINTS) + 0.5) / EVEN_POINTS
    above = np.searchsorted(numbers, points)
    up, down = numbers[above] - points, points - numbers[above - 1]
    errors = up * down if grid.is_stochastic else np.minimum(up, down) ** 2
    return np.cumsum(errors[::-1])[::-1] / np.arange(EVEN_POINTS, 0, -1)
