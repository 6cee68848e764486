"""Predicts the signal-to-noise ratio of a quantised product from statistics of its two operands.

If the errors of the operands are independent of each other and of the values, they add up in the product.
With n the mean squared error over the mean square of each operand, SNR = -10·log₁₀(n₁ + n₂ + n₁n₂) dB. The
estimator measures the errors on a sample of each operand, so n does not depend on a model of its values.

There are two signals: "bulk" is the product without elements beyond 6 sigma, whose energy would hide the
noise of the others; "all" is the whole product.

Not here: operands that depend on each other, and errors that depend on the values. A verified check measures
by how much they change the SNR (`exchange.Rounding.correction_db`), and the policy adds that to predictions.
docs/speculation-noise.md compares predictions with measurements.
"""

from __future__ import annotations

import math
from typing import Literal

from megalowbit.speculation.statistics import OperandStatistics

MAX_DB = 60.0  # highest prediction; beyond it, other errors of a bf16 run are larger
BF16_ERROR = 2.0**-18  # (2⁻⁹)², relative squared error of an operand left in bf16

Signal = Literal["bulk", "all"]


def predict_snr_db(
    left: OperandStatistics,
    right: OperandStatistics,
    candidate: int,
    *,
    unquantized: tuple[bool, bool] = (False, False),
    signal: Signal = "bulk",
) -> float:
    """Predicted SNR of a product, in dB.

    Args:
        left: statistics of the left operand.
        right: statistics of the right operand.
        candidate: index of the candidate among the statistics' `errors`.
        unquantized: whether the left and the right operand stay in high precision.
        signal: see the module's docstring.

    Returns:
        At most `MAX_DB`; inf if neither operand is quantised; NaN if statistics are not finite or there is no
        signal.
    """
    if all(unquantized):
        return math.inf
    for operand in (left, right):
        if not operand.is_finite or _power(operand, signal) <= 0:
            return math.nan
    one, other = (
        BF16_ERROR if is_unquantized else _error(operand, candidate, signal) / _power(operand, signal)
        for operand, is_unquantized in zip((left, right), unquantized, strict=True)
    )
    noise = one + other + one * other
    return min(-10 * math.log10(noise), MAX_DB) if noise > 0 else MAX_DB


def _power(operand: OperandStatistics, signal: Signal) -> float:
    return operand.bulk_power if signal == "bulk" else operand.power


def _error(operand: OperandStatistics, candidate: int, signal: Signal) -> float:
    errors = operand.errors[candidate]
    return errors.bulk if signal == "bulk" else errors.all
