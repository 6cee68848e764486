"""Errors under block scales: of blocks without outliers, and of the largest element of a block.

The largest magnitude a of n Gaussian numbers has the distribution (P(|x| ≤ a))ⁿ. The error of a block is
averaged over that distribution, with a itself on the grid and the other n - 1 elements within ±a. Rounding a
scale to E4M3 or E8M0 shifts the grid, and the effect depends on the position within an octave. For E8M0 that
is the position of sigma. For E4M3 it is the position in the tensor's range, or within an octave if the
tensor scale is a power of two; blocks are spread over it, so the error is averaged.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from megalowbit.speculation.noise.grid import CENTER_STEPS, LAST_CENTER, SMALLEST, Grid, levels
from megalowbit.speculation.noise.rounding import FAR, rounding_error

MAXIMA = 24  # equally likely values of a block's largest magnitude
PHASES = 16  # positions within an octave
E4M3_MAX = 448.0
MANTISSA_STEPS = 8  # E4M3 numbers per octave
E2M1_MANTISSA = 1.5  # mantissa of E2M1's largest number; only E2M1 has E8M0 or E4M3 scales
EVEN_SCALES = ("fp32", "signed_fp32")  # scales whose rounding is negligible


class Blocks(NamedTuple):
    """How a tensor is divided into blocks and scaled.

    Attributes:
        grid: grid of the elements; that of INT8 for mixed blocks.
        size: number of elements that share a scale.
        scale: kind of the scales, see `formats.block_format`.
        rounding: rounding of the scales: "nearest", "up" or "down".
        is_power_of_two: whether the tensor scale above E4M3 scales is a power of two.
    """

    grid: Grid
    size: int
    scale: str
    rounding: str
    is_power_of_two: bool = False


def clean_error(blocks: Blocks, sigma: float, center: float, absmax: float) -> float:
    """Mean squared error of a bulk N(center, sigma²) in blocks without outliers.

    Args:
        blocks: size and scales of the blocks.
        sigma: standard deviation of the bulk, ≥ 0.
        center: mean of the bulk; not 0 if sigma is 0.
        absmax: largest magnitude of the tensor, > 0; matters if the center is large, because then all blocks
            have nearly the same maximum.
    """
    if sigma == 0 or abs(center) > LAST_CENTER * sigma:
        return _far_error(blocks, sigma, abs(center), absmax)
    place = abs(center) / sigma * CENTER_STEPS
    row = min(int(place), int(LAST_CENTER * CENTER_STEPS) - 1)
    phase = math.log2(sigma) % 1 * PHASES if blocks.scale == "e8m0" else 0.0
    near = _at_phase(_clean_row(blocks, row), phase)
    value = near + (place - row) * (_at_phase(_clean_row(blocks, row + 1), phase) - near) if place else near
    return float(sigma * sigma * 2.0**value)


def _far_error(blocks: Blocks, sigma: float, center: float, absmax: float) -> float:
    """The same without tables, using the actual position of the block scales within an octave."""
    unit = sigma or center
    if blocks.scale == "e8m0":
        position = unit
    else:
        position = unit / E2M1_MANTISSA if blocks.is_power_of_two else E4M3_MAX * unit / absmax
    phase = math.log2(position) % 1
    if sigma == 0:
        return unit * unit * _point_error(blocks.grid, 1.0, _top(blocks, 1.0, phase))
    maxima = _block_maxima(blocks.size, center / unit)[1::3]
    return unit * unit * float(np.mean([_block_error(blocks, a, phase, center / unit) for a in maxima]))


def _at_phase(row: tuple[float, ...], phase: float) -> float:
    index = int(phase) % len(row)
    return row[index] + (phase - int(phase)) * (row[(index + 1) % len(row)] - row[index])


@functools.lru_cache(maxsize=32)
def largest_error(blocks: Blocks) -> float:
    """Relative mean squared error of a block's largest element, caused by the rounding of its scale."""
    if blocks.scale in EVEN_SCALES:
        return 0.0
    tops = [_top(blocks, 1.0, i / PHASES) for i in range(PHASES)]
    return float(np.mean([_point_error(blocks.grid, 1.0, top) for top in tops]))


def widening(blocks: Blocks) -> float:
    """By what factor, in the geometric mean, rounding the scale extends the grid beyond the block maximum."""
    if blocks.scale != "e8m0":
        return 1.0
    return math.sqrt(2) if blocks.rounding == "up" else E2M1_MANTISSA / math.sqrt(2)


@functools.lru_cache(maxsize=256)
def _clean_row(blocks: Blocks, row: int) -> tuple[float, ...]:
    """log₂ of the error of N(c, 1) for each position of sigma in an octave; one number if it is the same."""
    center = row / CENTER_STEPS
    maxima = _block_maxima(blocks.size, center)
    phases = [0.0] if blocks.scale in EVEN_SCALES else [i / PHASES for i in range(PHASES)]
    errors = [np.mean([_block_error(blocks, a, phase, center) for a in maxima]) for phase in phases]
    if blocks.scale == "e4m3":
        errors = [np.mean(errors)]
    return tuple(math.log2(max(float(error), SMALLEST)) for error in errors)


def _block_maxima(size: int, center: float) -> list[float]:
    """Quantiles of the largest magnitude of `size` numbers from N(center, 1)."""
    points = np.linspace(max(center - FAR, 0.0), center + FAR, 4096)
    root = math.sqrt(0.5)
    within = [math.erf((a - center) * root) / 2 + math.erf((a + center) * root) / 2 for a in points]
    wanted = ((np.arange(MAXIMA) + 0.5) / MAXIMA) ** (1 / size)
    return np.interp(wanted, within, points).tolist()


def _block_error(blocks: Blocks, largest: float, phase: float, center: float) -> float:
    top = _top(blocks, largest, phase)
    others = rounding_error(
        levels(blocks.grid.element) * top,
        1.0,
        center,
        is_stochastic=blocks.grid.is_stochastic,
        bounds=(-largest, largest),
    )
    return (_point_error(blocks.grid, largest, top) + (blocks.size - 1) * others) / blocks.size


def _point_error(grid: Grid, value: float, top: float) -> float:
    return rounding_error(levels(grid.element) * top, 0.0, value, is_stochastic=grid.is_stochastic)


def _top(blocks: Blocks, largest: float, phase: float) -> float:
    """The value that the format's largest number represents in a block whose largest magnitude is `largest`.

    Args:
        blocks: kind and rounding of the scales.
        largest: largest magnitude, in units of sigma.
        phase: log₂ of that unit, for E4M3 relative to the tensor's scale; only its fraction matters.
    """
    if blocks.scale in EVEN_SCALES:
        return largest
    if blocks.scale == "e4m3":
        unit = 2.0**phase
        mantissa, exponent = math.frexp(largest * unit)
        steps = mantissa * 2 * MANTISSA_STEPS
        steps = math.ceil(steps) if blocks.rounding == "up" else round(steps)
        return math.ldexp(steps / (2 * MANTISSA_STEPS), exponent) / unit
    # The scale is a power of two and E2M1's largest number is 1.5 · 2², so the result is 1.5 · 2^k.
    power = math.log2(largest / E2M1_MANTISSA) + phase
    if blocks.rounding == "up":
        return E2M1_MANTISSA * 2.0 ** (math.ceil(power) - phase)
    return E2M1_MANTISSA * 2.0 ** (math.floor(math.log2(largest) + phase) - phase)
