"""Mean squared error of rounding a Gaussian to a grid, in closed form and float64.

Between two rounding thresholds the squared error is a parabola in x. The moments of a Gaussian over an
interval follow from Φ and the density at its ends, so a sum over the grid is exact. The squared error is (x -
level)² for rounding to nearest, and (b - x)(x - a) on average for stochastic rounding between neighbours a
and b. Beyond the grid's ends, both saturate: the error is the distance to the end. This module is independent
of formats and tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FAR = 9.0  # standard deviations; beyond that, Φ is 0 or 1 to the last bit of float64

Floats = NDArray[np.float64]


def zero_probability(step: float, sigma: float, center: float = 0.0) -> float:
    """Probability that a number from N(center, sigma²) is rounded to 0 on an evenly spaced grid.

    Φ((step/2 - center)/sigma) - Φ((-step/2 - center)/sigma); with center 0, erf(step/(2·√2·sigma)).
    `step` is the distance between neighbours on the grid. With sigma 0, all numbers are `center`.
    """
    half = step / 2
    if sigma == 0:
        return float(abs(center) < half)
    scale = sigma * math.sqrt(2)
    if center == 0:
        return math.erf(half / scale)
    near, far = (half - abs(center)) / scale, (half + abs(center)) / scale
    if near < 0:  # both ends are in one tail, where erf would lose digits
        return (math.erfc(-near) - math.erfc(far)) / 2
    return (math.erf(near) + math.erf(far)) / 2


def rounding_error(
    levels: Sequence[float] | Floats,
    sigma: float,
    center: float,
    *,
    is_stochastic: bool,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> float:
    """Mean squared error of rounding N(center, sigma²) to a grid.

    Args:
        levels: the grid's numbers, ascending and signed; at least one.
        sigma: standard deviation, ≥ 0; with 0, all numbers are `center`.
        center: mean.
        is_stochastic: stochastic rounding; otherwise to nearest.
        bounds: average over numbers in these bounds only. A scale from the largest magnitude leaves nothing
            beyond the grid.

    Returns:
        The error; NaN if the probability of the bounds is 0.
    """
    grid = np.asarray(levels, dtype=np.float64)
    edges, vertex, sign, offset = _parabolas(grid, is_stochastic)
    edges = np.clip(edges, *bounds)
    if sigma == 0:
        cell = min(int(np.searchsorted(edges[1:-1], center)), len(vertex) - 1)
        return float(sign[cell] * (center - vertex[cell]) ** 2 + offset[cell])
    z = np.clip((edges - center) / sigma, -FAR, FAR)
    below = _normal_cdf(z)
    density = np.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))
    mass = np.diff(below)
    first = -np.diff(density)
    second = mass - np.diff(z * density)
    shift = center - vertex
    squares = sigma * sigma * second + 2 * sigma * shift * first + shift * shift * mass
    total = float(np.sum(sign * squares + offset * mass))
    probability = float(below[-1] - below[0])
    return max(total, 0.0) / probability if probability > 0 else math.nan


def _parabolas(grid: Floats, is_stochastic: bool) -> tuple[Floats, Floats, Floats, Floats]:
    """Intervals and their parabolas: error = sign·(x - vertex)² + offset; one more edge than intervals."""
    middles = (grid[1:] + grid[:-1]) / 2
    infinite = np.array([-np.inf]), np.array([np.inf])
    if not is_stochastic:
        edges = np.concatenate([infinite[0], middles, infinite[1]])
        return edges, grid, np.ones_like(grid), np.zeros_like(grid)
    edges = np.concatenate([infinite[0], grid, infinite[1]])
    vertex = np.concatenate([grid[:1], middles, grid[-1:]])
    halves = np.concatenate([np.zeros(1), np.diff(grid) / 2, np.zeros(1)])
    sign = np.full_like(vertex, -1.0)
    sign[[0, -1]] = 1.0
    return edges, vertex, sign, halves**2


def _normal_cdf(z: Floats) -> Floats:
    scaled = (z * math.sqrt(0.5)).tolist()
    return 0.5 + 0.5 * np.array([math.erf(value) for value in scaled])
