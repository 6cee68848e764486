"""What is known of an operand before it is quantised: seven numbers, one row of a table.

A tensor is taken as a *bulk*, close to a Gaussian of `center` and `sigma`, and few outliers beyond
`OUTLIER_SIGMAS`. The bulk is what a product is made of, the largest magnitude is what a scale must reach:
their ratio says how many levels of a format are left for the bulk.

Not covered: where the outliers are (one channel, or anywhere), and the bulk's shape if it is no Gaussian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

OUTLIER_SIGMAS = 6.0  # a Gaussian has 2e-9 of its elements beyond


@dataclass(frozen=True, kw_only=True)
class OperandStatistics:
    """One operand's numbers; a row of the table has them in this order. Not finite where the operand is not.

    Attributes:
        count: elements of the operand.
        absmax: largest magnitude of all elements.
        center: of the bulk, estimated from a sample.
        sigma: standard deviation of the bulk, estimated from a sample.
        power: mean square of all elements.
        bulk_power: mean square of the elements within `OUTLIER_SIGMAS` · sigma of the center, from a sample.
        outlier_share: share of the elements beyond, 0 … 1, from a sample.
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
        """M/σ: largest magnitude in standard deviations of the bulk; NaN for a bulk without spread."""
        return self.absmax / self.sigma if self.sigma > 0 else math.nan

    @property
    def is_finite(self) -> bool:
        """Whether a prediction can be made of these numbers."""
        numbers = self.absmax + self.center + self.sigma + self.power + self.bulk_power + self.outlier_share
        return math.isfinite(self.count + numbers)  # asked for each prediction, so without a loop


COLUMNS = tuple(field.name for field in fields(OperandStatistics))
