"""What rounding a Gaussian to a grid costs, in closed form and float64.

Between two thresholds the error is a parabola, and a Gaussian's moments over an interval follow from Φ and
its density at both ends: a sum over the grid is exact. Rounding to nearest errs by (x - level)², stochastic
rounding between neighbours a and b by (b - x)(x - a) on average; both err beyond the grid's ends by the
distance to the end. Nothing here knows of formats or tensors.

Not covered: the 256 steps of a stochastic rounding that draws one byte, whose error is within .01 % of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FAR = 9.0  # standard deviations; beyond, Φ is 0 or 1 to the last bit of float64

Floats = NDArray[np.float64]


def zero_probability(step: float, sigma: float, center: float = 0.0) -> float:
    """Probability that a number from N(center, sigma²) is rounded to 0 on an even grid.

    Φ((step/2 - center)/sigma) - Φ((-step/2 - center)/sigma), for a center of 0 erf(step/(2·√2·sigma)).
    A sigma of 0 is the point `center`; `step` is the distance of neighbours on the grid.
    """
    half = step / 2
    if sigma == 0:
        return float(abs(center) < half)
    scale = sigma * math.sqrt(2)
    if center == 0:
        return math.erf(half / scale)
    near, far = (half - abs(center)) / scale, (half + abs(center)) / scale
    if near < 0:  # both ends in one tail, where erfc keeps the digits
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
        levels: the grid's numbers, rising, at least one, signs included.
        sigma: standard deviation, ≥ 0; 0 is the point `center`.
        center: mean.
        is_stochastic: or to nearest.
        bounds: only what lies between them, and the mean over that: a scale from the largest magnitude has
            nothing beyond the grid.

    Returns:
        The error; NaN where the bounds leave a probability of 0.
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
    """Edges of the pieces (one more than pieces), and error = sign·(x - vertex)² + offset in each."""
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
