"""Statistics of an operand before quantisation: one row of a table.

A tensor has a *bulk*, the elements within `OUTLIER_SIGMAS` of its center, and a few outliers. The bulk
carries the product, but the scale must reach the largest magnitude. Their ratio determines how many levels of
a format are left for the bulk.

Not covered: the position of outliers (one channel, or anywhere).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

OUTLIER_SIGMAS = 6.0  # a share of 2e-9 of a Gaussian's elements is beyond


@dataclass(frozen=True, kw_only=True)
class OperandStatistics:
    """Statistics of one operand, in the order of a table row. Not finite if the operand is not.

    Attributes:
        count: number of elements.
        absmax: largest magnitude of all elements.
        center: median of a sample.
        sigma: standard deviation of the bulk if it is a Gaussian, estimated from a sample.
        bulk_power: mean square of the elements within `OUTLIER_SIGMAS` · sigma of the center, from a sample.
        errors: mean squared rounding error of these elements at each candidate but the last, cheapest first.
    """

    count: float
    absmax: float
    center: float
    sigma: float
    bulk_power: float
    errors: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """M/σ: largest magnitude in standard deviations of the bulk; NaN if sigma is 0."""
        return self.absmax / self.sigma if self.sigma > 0 else math.nan

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite, so that a prediction is possible."""
        numbers = [getattr(self, name) for name in COLUMNS]
        return all(map(math.isfinite, [*numbers, *self.errors]))


# the error at each candidate follows
COLUMNS = tuple(field.name for field in fields(OperandStatistics) if field.name != "errors")
