"""Statistics of an operand before quantisation: seven numbers, one row of a table.

The model of a tensor: a *bulk*, approximately Gaussian with mean `center` and standard deviation `sigma`, and
a few outliers beyond `OUTLIER_SIGMAS`. The bulk carries the product, but the scale must reach the largest
magnitude. Their ratio determines how many levels of a format are left for the bulk.

Not covered: the position of outliers (one channel, or anywhere), and a bulk that is not Gaussian.
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
        center: mean of the bulk, estimated from a sample.
        sigma: standard deviation of the bulk, estimated from a sample.
        power: mean square of all elements.
        bulk_power: mean square of the elements within `OUTLIER_SIGMAS` · sigma of the center, from a sample.
        outlier_share: share of the elements beyond that, 0 … 1, from a sample.
    """

    count: float
    absmax: float
    center: float
    sigma: float
    power: float
    bulk_power: float
    outlier_share: float

    @property
    def ratio(self) -> float:
        """M/σ: largest magnitude in standard deviations of the bulk; NaN if sigma is 0."""
        return self.absmax / self.sigma if self.sigma > 0 else math.nan

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite, so that a prediction is possible."""
        numbers = self.absmax + self.center + self.sigma + self.power + self.bulk_power + self.outlier_share
        return math.isfinite(
            self.count + numbers
        )  # evaluated for each prediction; a sum is faster than a loop


COLUMNS = tuple(field.name for field in fields(OperandStatistics))
