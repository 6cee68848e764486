"""From statistics of two operands to the signal-to-noise ratio of their product, before it is quantised.

Errors of the operands that have nothing to do with each other or with the values add up in a product: with n
the mean squared error over the mean square of each, SNR = -10·log₁₀(n₁ + n₂ + n₁n₂) dB. What an operand errs
is the exact rounding error of its bulk, a Gaussian, on the grid that its largest magnitude stretches; under
block scales also of the blocks that hold an outlier, and of the outliers themselves.

Two models: "calibrated", this one; "zeros" counts amplitude lost by values that become zero, for even grids
only, and reads 5 dB low. Two signals: "bulk" is the product without elements beyond 6 sigma, whose energy
hides what becomes of the others; "all" is the whole product.

Limits. Operands are taken to have nothing to do with each other: where both have a mean the signal is larger.
Coarse rounding to nearest shrinks values, its error is no noise any more: below an SNR of 0 dB (INT4 from
M/sigma = 16 on, INT8 from 290) predictions are low, by up to 5 dB. Where outliers are is not known: blocks
are taken to be hit at random, which reads low where a few rows or channels hold them all. "all" is an
expectation: once outliers bring most of the power, a product's ratio depends on whether they meet.
docs/speculation.md has what was measured.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

from megalowbit.errors import UserError
from megalowbit.formats.element import ELEMENTS
from megalowbit.formats.mixed_blocks import THRESHOLD
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.quantizer import BlockQuantizer
from megalowbit.speculation.noise.block import Blocks, clean_error, largest_error, widening
from megalowbit.speculation.noise.grid import Grid, even_error, gaussian_error
from megalowbit.speculation.noise.rounding import zero_probability
from megalowbit.speculation.statistics import OUTLIER_SIGMAS, OperandStatistics

MAX_DB = 60.0  # what a quantised product can be foretold: beyond, other errors of a bf16 run are larger
BF16_ERROR = 2.0**-18  # (2⁻⁹)², of an operand left in bf16, relative
E4M3_RANGE = 2.0**15  # M/sigma from which a block of the bulk gets less than E4M3's normal scales
INT8_LEVELS = 127
EVEN_SQUARE = 7 / 12  # mean square of numbers spread evenly in [½, 1]

Model = Literal["calibrated", "zeros"]
Signal = Literal["bulk", "all"]


class Noise(NamedTuple):
    """Mean squared errors of one operand, in the square of its unit.

    Attributes:
        bulk: per element within 6 sigma.
        all: per element.
    """

    bulk: float
    all: float


class _Outliers(NamedTuple):
    """What lies beyond the bulk, but for the largest element, which every scale reaches.

    Attributes:
        share: of all elements.
        power: their part of the mean square of all elements.
        typical: root of their mean square; the largest magnitude where there is no other.
    """

    share: float
    power: float
    typical: float


def zeros_snr_db(p_left: float, p_right: float) -> float:
    """SNR of a product by the probabilities that elements become zero: -20·log₁₀(p₁ + p₂ - p₁p₂) dB."""
    lost = p_left + p_right - p_left * p_right
    return -20 * math.log10(lost) if lost > 0 else math.inf


def predict_snr_db(
    left: tuple[str, OperandStatistics],
    right: tuple[str, OperandStatistics],
    *,
    model: Model = "calibrated",
    signal: Signal = "bulk",
) -> float:
    """SNR that a product is going to have, in dB.

    Args:
        left: a quantiser's name and the statistics of the operand it is going to get.
        right: likewise.
        model: see above.
        signal: see above; the model "zeros" knows no difference.

    Returns:
        At most `MAX_DB`; inf where both operands stay unquantised; NaN where statistics are not finite, or
        there is no signal.

    Raises:
        UserError: there is no such quantiser, or no model of its noise.
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
            f"the noise model 'zeros' knows even grids under one scale, not quantizer {name!r}: "
            'write "calibrated", or use int4 or int8'
        )
    step = 2 * statistics.absmax / (2 ** ELEMENTS[format.element].bits - 1)
    return zero_probability(step, statistics.sigma, statistics.center)


@functools.lru_cache(maxsize=2048)  # a look asks twice for each, once a product
def operand_noise(quantizer_name: str, statistics: OperandStatistics) -> Noise:
    """Mean squared errors that quantising an operand, whose statistics are finite, leaves.

    Raises:
        UserError: there is no such quantiser, or no model of its noise.
    """
    format = _format(quantizer_name)
    if format is None:
        return Noise(BF16_ERROR * statistics.bulk_power, BF16_ERROR * statistics.power)
    if statistics.absmax == 0:
        return Noise(0.0, 0.0)
    # The spread that explains the bulk's power: what lies between a Gaussian's tails and 6 sigma counts.
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
    """What outliers err, per element of the tensor.

    Their magnitudes are taken as evenly in [b, M], where the mean square (b² + bM + M²)/3 is theirs; as those
    of a Gaussian where theirs is less than of any such b.
    """
    square = outliers.typical**2
    if square <= absmax**2 / 3:
        return outliers.share * gaussian_error(grid, absmax, outliers.typical, 0.0)
    least = (math.sqrt(12 * square - 3 * absmax**2) - absmax) / 2
    return outliers.power / square * even_error(grid, absmax, least)


def _block_noise(
    blocks: Blocks, statistics: OperandStatistics, sigma: float, center: float, outliers: _Outliers
) -> tuple[float, float]:
    """Of the bulk per element of it, and of outliers per element of the tensor."""
    clean = clean_error(blocks, sigma, center, statistics.absmax) if statistics.bulk_power > 0 else 0.0
    share, size = statistics.outlier_share, blocks.size
    if share <= 0:
        return clean, 0.0
    grid = _grid_beside(blocks, outliers.typical, sigma, center)
    hit = 1 - (1 - share) ** (size - 1)  # elements of the bulk that share a block with an outlier
    top = outliers.typical * widening(blocks)
    bulk = (1 - hit) * clean + hit * gaussian_error(grid, top, sigma, center)
    is_first = (1 - (1 - share) ** size) / (size * share)  # outliers that are the largest of their block
    if outliers.typical**2 > statistics.absmax**2 / 3:
        beside = _outlier_error(grid, statistics.absmax, outliers)
    else:  # beside one of their own octave
        beside = outliers.power * even_error(grid, 1.0, 0.5) / EVEN_SQUARE
    return bulk, is_first * outliers.power * largest_error(blocks) + (1 - is_first) * beside


def _grid_beside(blocks: Blocks, largest: float, sigma: float, center: float) -> Grid:
    """The grid of a block of the bulk whose largest magnitude is an outlier."""
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
    """What of a quantiser decides its errors: a grid under one scale, or blocks; `None`: identity."""
    owner = quantizer(name)
    if owner.is_identity:
        return None
    encoding = owner.encoding if isinstance(owner, BlockQuantizer) else None
    if encoding is None or encoding.scale_from != "amax" or encoding.q_scalar != 1 or encoding.four_over_six:
        raise UserError(
            f"quantizer {name!r} has no noise model: use one of fp4e2m1, fp6e3m2, fp8e4m3, fp8e5m2, "
            "int8, int8, int4, their forms with b, nvfp4…, mxfp4… or int8e5m2b, without q_scalar and 4over6"
        )
    format = encoding.format
    grid = Grid(format.element.name, encoding.is_stochastic)
    if format.block is None:
        return grid
    return Blocks(grid, math.prod(format.block), format.scale, encoding.scale_rounding)
