"""Gap over model size: a power law, with the uncertainty of its exponent.

The model is gap(N) = A·(N / N₀)^b with independent normal errors of equal variance, where N is the number of
parameters and N₀ the geometric mean of the sizes. The gaps themselves are fitted, not their logarithms: noise
makes single gaps negative. For a given b the best A has a closed form, so one search over b finds the least
sum of squares. The variance is that of the values within the sizes, pooled. The interval of b contains all b
whose sum of squares is not significantly larger (extra-sum-of-squares F test; Seber and Wild, Nonlinear
Regression, 1989, chapter 5); it is not symmetric, and may be open where the data cannot exclude any steeper
law. The same variance tests whether a power law fits at all.

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
    t_quantile,
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
    least, dof = squares(exponent), sum(counts.values()) - len(values)
    low = high = p_of_fit = None
    variance = sum((each - means[n]) ** 2 for n in values for each in values[n]) / dof if dof else 0.0
    if variance:
        limit = least + variance * t_quantile(CONFIDENCE, dof) ** 2
        low, high = _edge(squares, exponent, -STEEPEST, limit), _edge(squares, exponent, STEEPEST, limit)
        p_of_fit = f_exceeds(least / (len(values) - 2) / variance, len(values) - 2, dof)
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
