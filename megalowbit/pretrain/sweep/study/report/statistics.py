"""Paired statistics: Student's t in closed form, confidence intervals, Holm's correction, and delays."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CONFIDENCE = 0.95
FRACTION_TERMS = 200


def probability_within(t: float, dof: int) -> float:
    """P(|T| ≤ t) for Student's t with `dof` degrees of freedom.

    A finite sum in the cosine of θ = atan(t / √dof): Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    if dof < 1:
        raise ValueError(f"dof must be at least 1: {dof}")
    theta = math.atan2(t, math.sqrt(dof))
    sine, cosine = math.sin(theta), math.cos(theta)
    is_odd = dof % 2
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for power in range(is_odd, dof - 1, 2):  # of the cosine
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    if is_odd:
        return 2 / math.pi * (theta + sine * total)
    return sine * total


def t_quantile(confidence: float, dof: int) -> float:
    """The t with P(|T| ≤ t) = confidence, by bisection."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1: {confidence}")
    low, high = 0.0, 1.0
    while probability_within(high, dof) < confidence:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        if probability_within(middle, dof) < confidence:
            low = middle
        else:
            high = middle
    return high


def f_exceeds(value: float, dof: int, dof_of_noise: float) -> float:
    """P(F > value) for the F distribution: a regularised incomplete beta function."""
    x = dof_of_noise / (dof_of_noise + dof * value)
    return regularised_beta(x, dof_of_noise / 2, dof / 2)


def regularised_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) by its continued fraction, evaluated from its end: Abramowitz and Stegun, 26.5.8."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - regularised_beta(1 - x, b, a)
    fraction = 1.0
    for m in range(FRACTION_TERMS, 0, -1):
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        fraction = 1 + odd / (1 + even / fraction)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(logarithm + a * math.log(x) + b * math.log1p(-x)) / (a * fraction)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, its confidence interval, and the two-sided p of a mean of zero.

    The interval and p are None with one value, and without any spread p is 0 or 1.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None
    num_pairs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The estimate from independent values; at least one."""
        count, mean = len(values), statistics.fmean(values)
        if count == 1:
            return cls(mean=mean, low=None, high=None, p=None, num_pairs=1)
        error = statistics.stdev(values) / math.sqrt(count)
        half = t_quantile(CONFIDENCE, count - 1) * error
        p = 1 - probability_within(abs(mean) / error, count - 1) if error else float(mean == 0)
        return cls(mean=mean, low=mean - half, high=mean + half, p=max(p, 0.0), num_pairs=count)

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside the interval; False if there is none."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit; `factor` is positive."""
        low, high = (None if each is None else each * factor for each in (self.low, self.high))
        return Estimate(mean=self.mean * factor, low=low, high=high, p=self.p, num_pairs=self.num_pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for all of them by Holm's step-down method, in the same order."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The paired difference `first` − `second`, and its p adjusted for all comparisons made with it."""

    first: str
    second: str
    difference: Estimate
    adjusted_p: float

    @property
    def is_separated(self) -> bool:
        """Whether the difference is significant after the correction."""
        return self.adjusted_p < 1 - CONFIDENCE


def compare_all(losses: Mapping[str, Mapping[Any, float]]) -> list[Comparison]:
    """All pairs of names, over the keys that both have; pairs with fewer than two keys are left out."""
    found = []
    for first, second in itertools.combinations(losses, 2):
        keys = [key for key in losses[first] if key in losses[second]]
        if len(keys) > 1:
            values = [losses[first][key] - losses[second][key] for key in keys]
            found.append((first, second, Estimate.of(values)))
    adjusted = holm([each.p or 0.0 for _, _, each in found])
    return [
        Comparison(first=first, second=second, difference=each, adjusted_p=p)
        for (first, second, each), p in zip(found, adjusted, strict=True)
    ]


def delay(loss: float, baseline: Mapping[int, float]) -> float | None:
    """The steps between the first time the baseline has a loss and the first time it has its own last loss.

    Args:
        loss: of a recipe at the end, in nats.
        baseline: step → its mean loss in nats, interpolated linearly; NaN is left out.

    Returns:
        0 if the loss is not above the baseline's. `None` if it is unknown, or above the baseline's at its
        first step.
    """
    points = [(step, mean) for step, mean in sorted(baseline.items()) if not math.isnan(mean)]
    if math.isnan(loss) or not points or loss > points[0][1]:
        return None
    last = points[-1][1]
    return _first_at(last, points) - _first_at(loss, points) if loss > last else 0.0


def _first_at(loss: float, points: Sequence[tuple[int, float]]) -> float:
    """The first step at which an interpolated curve has come down to a loss, which it has somewhere."""
    number = next(number for number, (_, mean) in enumerate(points) if mean <= loss)
    step, mean = points[number]
    if number == 0:
        return step
    before, higher = points[number - 1]
    return step - (step - before) * (loss - mean) / (higher - mean)
