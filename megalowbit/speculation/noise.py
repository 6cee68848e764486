"""Predicts the signal-to-noise ratio of a quantised product from statistics of its two operands.

If the errors of the operands are independent of each other and of the values, they add up in the product.
With n the mean squared error over the mean square of each operand, SNR = -10·log₁₀(n₁ + n₂ + n₁n₂) dB. The
estimator measures the errors on a sample of each operand, so n does not depend on a model of its values.

Signal and noise are those of the bulk: the product without elements beyond 6 sigma, whose energy would hide
the noise of the others. Whether a few such elements meet in a sum is chance, which no average predicts.

Not here: operands that depend on each other, and errors that depend on the values. A verified check measures
by how much they change the SNR (`exchange.Rounding.correction_db`), and the policy adds that to predictions.
docs/speculation-noise.md compares predictions with measurements.
"""

from __future__ import annotations

import math

from megalowbit.speculation.statistics import OperandStatistics

MAX_DB = 60.0  # highest prediction; beyond it, other errors of a bf16 run are larger
BF16_ERROR = 2.0**-18  # (2⁻⁹)², relative squared error of an operand left in bf16


def predict_snr_db(
    left: OperandStatistics,
    right: OperandStatistics,
    candidate: int,
    *,
    unquantized: tuple[bool, bool] = (False, False),
) -> float:
    """Predicted SNR of a product, in dB.

    Args:
        left: statistics of the left operand.
        right: statistics of the right operand.
        candidate: index of the candidate among the statistics' `errors`.
        unquantized: whether the left and the right operand stay in high precision.

    Returns:
        At most `MAX_DB`; inf if neither operand is quantised; NaN if statistics are not finite or there is no
        signal.
    """
    if all(unquantized):
        return math.inf
    for operand in (left, right):
        if not operand.is_finite or operand.bulk_power <= 0:
            return math.nan
    one, other = (
        BF16_ERROR if is_unquantized else operand.errors[candidate] / operand.bulk_power
        for operand, is_unquantized in zip((left, right), unquantized, strict=True)
    )
    noise = one + other + one * other
    return min(-10 * math.log10(noise), MAX_DB) if noise > 0 else MAX_DB


def predict_candidates(
    left: OperandStatistics, right: OperandStatistics, count: int, *, unquantized: tuple[bool, bool]
) -> list[float]:
    """Predicted SNR of a product at each candidate, in dB, before corrections.

    Args:
        left: statistics of the left operand.
        right: statistics of the right operand.
        count: number of candidates but the last, which quantises nothing.
        unquantized: as in `predict_snr_db`.

    Returns:
        `count` predictions, and inf for the last candidate.
    """
    found = [predict_snr_db(left, right, index, unquantized=unquantized) for index in range(count)]
    return [*found, math.inf]
