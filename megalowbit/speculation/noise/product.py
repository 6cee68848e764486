"""Predicts the signal-to-noise ratio of a quantised product from statistics of its two operands.

If the errors of the operands are independent of each other and of the values, they add up in the product.
With n the mean squared error over the mean square of each operand, SNR = -10·log₁₀(n₁ + n₂ + n₁n₂) dB. The
error of an operand is the exact rounding error of its bulk, a Gaussian, on the grid scaled to its largest
magnitude. Under block scales, blocks with an outlier, and the outliers themselves, are added.

There are two models: "calibrated" is described above. "zeros" counts only the amplitude of values that become
zero; it is for evenly spaced grids, and its SNR is 5 dB too low. There are two signals: "bulk" is the product
without elements beyond 6 sigma, whose energy would hide the noise of the others; "all" is the whole product.

Limits:

- Operands are assumed independent. If both have a mean, the signal is larger than predicted.
- Coarse rounding to nearest shrinks values, and that error is not independent noise. Below an SNR of 0 dB
  (INT4 from M/sigma = 16, INT8 from 290) predictions are up to 5 dB low.
- Outliers are assumed to be at random positions. If a few rows or channels contain all of them, predictions
  for block formats are low.
- "all" is an expected value. If outliers carry most of the power, the SNR of a single product depends on
  whether they meet in a sum.

docs/speculation-noise.md compares predictions with measurements.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

from megalowbit.errors import UserError
from megalowbit.formats.element import E2M1, ELEMENTS
from megalowbit.formats.mixed_blocks import THRESHOLD
from megalowbit.quantize.encoding import Encoding
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.speculation.noise.block import EVEN_SCALES, Blocks, clean_error, largest_error, widening
from megalowbit.speculation.noise.grid import Grid, even_error, gaussian_error
from megalowbit.speculation.noise.rounding import zero_probability
from megalowbit.speculation.statistics import OUTLIER_SIGMAS, OperandStatistics

MAX_DB = 60.0  # highest prediction; beyond it, other errors of a bf16 run are larger
BF16_ERROR = 2.0**-18  # (2⁻⁹)², relative squared error of an operand left in bf16
E4M3_RANGE = 2.0**15  # above this M/sigma, blocks of the bulk have subnormal E4M3 scales
INT8_LEVELS = 127
EVEN_SQUARE = 7 / 12  # mean square of numbers evenly distributed in [½, 1]

Model = Literal["calibrated", "zeros"]
Signal = Literal["bulk", "all"]


class Noise(NamedTuple):
    """Mean squared errors of one operand.

    Attributes:
        bulk: over the elements within 6 sigma.
        all: over all elements.
    """

    bulk: float
    all: float


class _Outliers(NamedTuple):
    """The elements beyond the bulk, without the largest one, which has no error under its own scale.

    Attributes:
        share: their share of all elements.
        power: their part of the mean square of all elements.
        typical: their root mean square; the tensor's largest magnitude if there are none.
    """

    share: float
    power: float
    typical: float


def zeros_snr_db(p_left: float, p_right: float) -> float:
    """SNR of a product from the probabilities that elements become zero: -20·log₁₀(p₁ + p₂ - p₁p₂) dB."""
    lost = p_left + p_right - p_left * p_right
    return -20 * math.log10(lost) if lost > 0 else math.inf


def predict_snr_db(
    left: tuple[str, OperandStatistics],
    right: tuple[str, OperandStatistics],
    *,
    model: Model = "calibrated",
    signal: Signal = "bulk",
) -> float:
    """Predicted SNR of a product, in dB.

    Args:
        left: name of the left operand's quantizer, and the operand's statistics.
        right: the same for the right operand.
        model: see the module's docstring.
        signal: see the module's docstring; has no effect on the model "zeros".

    Returns:
        At most `MAX_DB`; inf if neither operand is quantised; NaN if statistics are not finite or there is no
        signal.

    Raises:
        UserError: there is no such quantizer, or no model of its noise.
    """
    if _format(left[0]) is None and _format(right[0]) is None:
        return math.inf
    for _, statistics in (left, right):
        power = statistics.bulk_power if signal == "bulk" else statistics.power
        if not statistics.is_finite or power <= 0:
            return math.nan
    if model == "zeros":
        return min(zeros_snr_db(_lost(*left), _lost(*right)), MAX_DB)
    one, other = _relative(*left, signal), _relative(*right, signal)
    noise = one + other + one * other
    return min(-10 * math.log10(noise), MAX_DB) if noise > 0 else MAX_DB


def _relative(name: str, statistics: OperandStatistics, signal: Signal) -> float:
    noise = operand_noise(name, statistics)
    if signal == "bulk":
        return noise.bulk / statistics.bulk_power
    return noise.all / statistics.power


def _lost(name: str, statistics: OperandStatistics) -> float:
    """Share of an operand that becomes zero at a step of 2M/(2^bits - 1)."""
    format = _format(name)
    if format is None:
        return 0.0
    if isinstance(format, Blocks) or not format.element.startswith("int"):
        raise UserError(
            f"the noise model 'zeros' supports evenly spaced grids with one scale, not quantizer {name!r}: "
            'write "calibrated", or use int4 or int8'
        )
    step = 2 * statistics.absmax / (2 ** ELEMENTS[format.element].bits - 1)
    return zero_probability(step, statistics.sigma, statistics.center)


@functools.lru_cache(maxsize=2048)  # a check needs each operand twice, once per product
def operand_noise(quantizer_name: str, statistics: OperandStatistics) -> Noise:
    """Mean squared errors of quantising an operand, whose statistics are finite.

    Raises:
        UserError: there is no such quantizer, or no model of its noise.
    """
    format = _format(quantizer_name)
    if format is None:
        return Noise(BF16_ERROR * statistics.bulk_power, BF16_ERROR * statistics.power)
    if statistics.absmax == 0:
        return Noise(0.0, 0.0)
    # sigma is taken from the bulk's power, to include elements between a Gaussian's tails and 6 sigma
    center = math.copysign(min(abs(statistics.center), math.sqrt(statistics.bulk_power)), statistics.center)
    sigma = math.sqrt(max(statistics.bulk_power - center * center, 0.0))
    outliers = _outliers(statistics)
    if isinstance(format, Grid):
        bulk = gaussian_error(format, statistics.absmax, sigma, center)
        beyond = _outlier_error(format, statistics.absmax, outliers)
    elif format.scale == "e4m3" and 0 < E4M3_RANGE * math.sqrt(statistics.bulk_power) < statistics.absmax:
        return Noise(statistics.bulk_power, statistics.power)
    else:
        bulk, beyond = _block_noise(format, statistics, sigma, center, outliers)
    return Noise(bulk, (1 - statistics.outlier_share) * bulk + beyond)


def _outliers(statistics: OperandStatistics) -> _Outliers:
    share, absmax = statistics.outlier_share, statistics.absmax
    others = share - 1 / statistics.count
    power = statistics.power - (1 - share) * statistics.bulk_power - absmax**2 / statistics.count
    if others <= 0 or power <= 0:
        return _Outliers(0.0, 0.0, absmax)
    threshold = min(OUTLIER_SIGMAS * statistics.sigma, absmax)
    return _Outliers(others, power, min(max(math.sqrt(power / others), threshold), absmax))


def _outlier_error(grid: Grid, absmax: float, outliers: _Outliers) -> float:
    """Squared error of the outliers, per element of the tensor.

    Their magnitudes are modelled as evenly distributed in [b, M], with b such that the mean square
    (b² + bM + M²)/3 is theirs. If their mean square is too small for any b ≥ 0, they are modelled as a
    Gaussian.
    """
    square = outliers.typical**2
    if square <= absmax**2 / 3:
        return outliers.share * gaussian_error(grid, absmax, outliers.typical, 0.0)
    least = (math.sqrt(12 * square - 3 * absmax**2) - absmax) / 2
    return outliers.power / square * even_error(grid, absmax, least)


def _block_noise(
    blocks: Blocks, statistics: OperandStatistics, sigma: float, center: float, outliers: _Outliers
) -> tuple[float, float]:
    """Squared error of the bulk, per element of the bulk, and of outliers, per element of the tensor."""
    clean = clean_error(blocks, sigma, center, statistics.absmax) if statistics.bulk_power > 0 else 0.0
    share, size = statistics.outlier_share, blocks.size
    if share <= 0:
        return clean, 0.0
    grid = _grid_with_outlier(blocks, outliers.typical, sigma, center)
    hit = 1 - (1 - share) ** (size - 1)  # share of the bulk's elements in a block with an outlier
    top = outliers.typical * widening(blocks)
    bulk = (1 - hit) * clean + hit * gaussian_error(grid, top, sigma, center)
    largest_share = (1 - (1 - share) ** size) / (size * share)  # of outliers: the largest of their block
    if outliers.typical**2 > statistics.absmax**2 / 3:
        others = _outlier_error(grid, statistics.absmax, outliers)
    else:  # assume that the largest of the block is in the same octave
        others = outliers.power * even_error(grid, 1.0, 0.5) / EVEN_SQUARE
    return bulk, largest_share * outliers.power * largest_error(blocks) + (1 - largest_share) * others


def _grid_with_outlier(blocks: Blocks, largest: float, sigma: float, center: float) -> Grid:
    """The grid of a block whose largest magnitude is an outlier, and whose other elements are of the bulk."""
    if blocks.scale != "signed_fp32":
        return blocks.grid
    mean = abs(center)
    if sigma > 0:
        z = abs(center) / (sigma * math.sqrt(2))
        mean = sigma * math.sqrt(2 / math.pi) * math.exp(-z * z) + abs(center) * math.erf(z)
    numerator, denominator = THRESHOLD
    is_e5m2 = INT8_LEVELS * mean * denominator < numerator * largest
    return Grid("e5m2" if is_e5m2 else "int8", blocks.grid.is_stochastic)


@functools.lru_cache(maxsize=256)
def _format(name: str) -> Grid | Blocks | None:
    """The properties of a quantizer that determine its errors: a grid or blocks; `None`: identity."""
    owner = quantizer(name)
    if owner.is_identity:
        return None
    encoding = owner.encoding if isinstance(owner, BlockQuantizer) else None
    if encoding is None or not _has_model(encoding):
        raise UserError(
            f"quantizer {name!r} has no noise model: use one of fp4e2m1, fp6e3m2, fp8e4m3, fp8e5m2, "
            "int8, int4, their forms with b, nvfp4…, mxfp4… or int8e5m2b, without q_scalar, 4over6 and eden"
        )
    format = encoding.format
    grid = Grid(format.element.name, encoding.is_stochastic)
    if format.block is None:
        return grid
    return Blocks(
        grid, math.prod(format.block), format.scale, encoding.scale_rounding, encoding.is_power_of_two
    )


def _has_model(encoding: Encoding) -> bool:
    format = encoding.format
    is_modelled = format.scale in EVEN_SCALES or (format.scale in ("e4m3", "e8m0") and format.element == E2M1)
    is_plain = encoding.scale_from == "amax" and encoding.q_scalar == 1 and not encoding.four_over_six
    is_plain = is_plain and not format.has_row_scales and not encoding.is_eden
    return is_modelled and is_plain
