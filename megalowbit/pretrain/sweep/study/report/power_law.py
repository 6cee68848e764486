"""Gap over model size: a power law, with the uncertainty of its exponent.

The model is gap(N) = A·(N / N₀)^b with independent normal errors, where N is the number of parameters and N₀
the geometric mean of the sizes. The gaps themselves are fitted, not their logarithms: noise makes single gaps
negative. For a given b the best A has a closed form, so one search over b finds the least sum of squares.

Larger models scatter more, so each size has a variance of its own, that of its seeds. Whether the data allow
an exponent b is tested by the derivative of the least sum of squares by b: that is a linear contrast of the
sizes' means, whose expected value is zero if b is the exponent. Its t has the degrees of freedom of
Satterthwaite (Biometrics Bulletin 2, 1946). The interval of b contains all b that this test does not reject.
It is not symmetric, and may be open where the data cannot exclude any steeper law. Whether a power law fits
at all is tested by the squares that it leaves, as Brown and Forsythe (Technometrics 16, 1974) test means.

Three sizes support an exponent within their range, not an extrapolation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megalowbit.pretrain.sweep.study.report.statistics import (
    CONFIDENCE,
    Estimate,
    f_exceeds,
)

LEAST_SIZES = 3
STEEPEST = 4.0  # exponent, of either sign
GRID = 200  # places in the first search


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """gap(N) = `gap` · (N / `size`)^`exponent`.

    Attributes:
        size: geometric mean of the sizes, in parameters.
        gap: at that size, in nats.
        exponent: None if the gap is not positive or the exponent is outside ± 4.
        low: of its interval (95 %); None if it is open.
        high: the other end.
        p_of_fit: probability of deviations from a power law as large as these, if it holds; None if unknown.
        estimates: number of parameters → the gap that was measured.
        conclusion: what the data support, in words.
    """

    size: float
    gap: float
    exponent: float | None
    low: float | None
    high: float | None
    p_of_fit: float | None
    estimates: Mapping[int, Estimate]
    conclusion: str

    def at(self, size: float) -> float:
        """The fitted gap at a size; NaN without an exponent."""
        return math.nan if self.exponent is None else self.gap * (size / self.size) ** self.exponent

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        estimates = {str(size): each.to_dict() for size, each in self.estimates.items()}
        return {**asdict(self), "estimates": estimates}


def fit(values: Mapping[int, Sequence[float]]) -> PowerLaw:
    """Fit a power law.

    Args:
        values: number of parameters → one gap for each seed; at least three sizes, each with a value.
    """
    if len(values) < LEAST_SIZES or not all(values.values()):
        raise ValueError(f"a power law needs {LEAST_SIZES} sizes with values: {dict(values)}")
    size = math.exp(statistics.fmean(map(math.log, values)))
    counts = {n: len(each) for n, each in values.items()}
    means = {n: statistics.fmean(each) for n, each in values.items()}

    def coefficient(exponent: float) -> float:
        shape = {n: (n / size) ** exponent for n in values}
        return sum(counts[n] * means[n] * shape[n] for n in values) / sum(
            counts[n] * shape[n] ** 2 for n in values
        )

    def squares(exponent: float) -> float:
        scale = coefficient(exponent)
        return sum(counts[n] * (means[n] - scale * (n / size) ** exponent) ** 2 for n in values)

    exponent = _minimum(squares)
    low = high = p_of_fit = None
    if all(count > 1 for count in counts.values()) and any(map(statistics.variance, values.values())):
        rejection = _Tests(values, size)
        low, high = (_edge(rejection.of_exponent, exponent, end, CONFIDENCE) for end in (-STEEPEST, STEEPEST))
        p_of_fit = 1 - rejection.of_fit(exponent, coefficient(exponent))
    is_found = coefficient(exponent) > 0 and abs(exponent) < STEEPEST * (1 - 1e-6)
    found = exponent if is_found else None
    return PowerLaw(
        size=size,
        gap=coefficient(exponent),
        exponent=found,
        low=low if is_found else None,
        high=high if is_found else None,
        p_of_fit=p_of_fit,
        estimates={n: Estimate.of(list(each)) for n, each in sorted(values.items())},
        conclusion=_conclusion(found, low, high, p_of_fit),
    )


class _Tests:
    """Tests of a fit: 1 - p, so that more is worse.

    Args:
        values: number of parameters → gaps, at least two of each.
        size: the geometric mean of the sizes.
    """

    def __init__(self, values: Mapping[int, Sequence[float]], size: float) -> None:
        self._places = {n: n / size for n in values}
        self._counts = {n: len(each) for n, each in values.items()}
        self._means = {n: statistics.fmean(each) for n, each in values.items()}
        self._variances = {n: statistics.variance(each) for n, each in values.items()}

    def of_exponent(self, exponent: float) -> float:
        """Of the exponent, by the contrast of the means that the derivative of the sum of squares is."""
        shape, slope = self._tangent(exponent)
        weights = {n: self._counts[n] * shape[n] * slope[n] for n in shape}
        value = sum(weights[n] * self._means[n] for n in weights)
        return self._rejection(value**2, 1, {n: weights[n] ** 2 / self._counts[n] for n in weights})

    def of_fit(self, exponent: float, scale: float) -> float:
        """Of a power law with any exponent, by the squares that the best one leaves."""
        shape, slope = self._tangent(exponent)
        counts, means = self._counts, self._means
        left = sum(counts[n] * (means[n] - scale * shape[n]) ** 2 for n in shape)
        plain = sum(counts[n] * shape[n] ** 2 for n in shape)
        sloped = sum(counts[n] * (shape[n] * slope[n]) ** 2 for n in shape)
        leverages = {n: counts[n] * shape[n] ** 2 * (1 / plain + slope[n] ** 2 / sloped) for n in shape}
        num_left = len(shape) - 2
        return self._rejection(
            left / num_left, num_left, {n: (1 - each) / num_left for n, each in leverages.items()}
        )

    def _tangent(self, exponent: float) -> tuple[dict[int, float], dict[int, float]]:
        """The shape of the law, and its derivative by the exponent, orthogonal to it and in units of it."""
        shape = {n: place**exponent for n, place in self._places.items()}
        masses = {n: self._counts[n] * shape[n] ** 2 for n in shape}
        logs = {n: math.log(place) for n, place in self._places.items()}
        middle = sum(masses[n] * logs[n] for n in shape) / sum(masses.values())
        return shape, {n: logs[n] - middle for n in shape}

    def _rejection(self, square: float, dof: int, weights: Mapping[int, float]) -> float:
        """1 - p of a square whose expected value is the weighted sum of the variances."""
        parts = {n: max(0.0, weights[n]) * self._variances[n] for n in weights}
        noise = sum(parts.values())
        if not noise:
            return float(square > 0)
        dof_of_noise = noise**2 / sum(each**2 / (self._counts[n] - 1) for n, each in parts.items())
        return 1 - f_exceeds(square / noise, dof, dof_of_noise)


def _conclusion(exponent: float | None, low: float | None, high: float | None, p_of_fit: float | None) -> str:
    if exponent is None:
        return "no power law: the gap is not clearly positive, or changes too fast"
    if p_of_fit is None:
        return "uncertainty unknown: it needs several seeds"
    if p_of_fit < 1 - CONFIDENCE:
        return f"no power law fits these sizes (p = {p_of_fit:.2g})"
    if low is None and high is None:
        return "these data do not determine the exponent"
    if high is not None and high < 0:
        return "falls with size"
    if low is not None and low > 0:
        return "grows with size"
    return "no trend is shown: an equal gap at all sizes fits too"


def _minimum(function: Callable[[float], float]) -> float:
    """Where a function is smallest within ± STEEPEST: the best point of a grid, refined by golden section."""
    step = 2 * STEEPEST / GRID
    best = min((number * step - STEEPEST for number in range(GRID + 1)), key=function)
    low, high, ratio = max(-STEEPEST, best - step), min(STEEPEST, best + step), (math.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if function(left) <= function(right) else (left, high)
    return (low + high) / 2


def _edge(function: Callable[[float], float], start: float, end: float, limit: float) -> float | None:
    """The first place from `start` to `end` where the function exceeds the limit; None: nowhere."""
    places = [start + (end - start) * number / GRID for number in range(GRID + 1)]
    inside = start
    for outside in places[1:]:
        if function(outside) > limit:
            break
        inside = outside
    else:
        return None
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if function(middle) > limit else (middle, outside)
    return (inside + outside) / 2
