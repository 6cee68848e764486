"""Errors under block scales: of a block of nothing but the bulk, and of the largest element of a block.

The largest of n numbers from a Gaussian has the distribution (P(|x| ≤ a))ⁿ; a block is averaged over it, with
a itself on the grid and the other n - 1 elements within ±a. Scales in E4M3 or E8M0 move the grid by the
rounding of the scale, whose effect depends on where the block stands in an octave: E8M0 on sigma's own place,
E4M3 on the place in the tensor's range, over which is averaged, as blocks are spread over it.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from megalowbit.speculation.noise.grid import CENTER_STEPS, LAST_CENTER, SMALLEST, Grid, levels
from megalowbit.speculation.noise.rounding import FAR, rounding_error

MAXIMA = 24  # values of a block's largest magnitude, equally likely
PHASES = 16  # parts of an octave
E4M3_MAX = 448.0
MANTISSA_STEPS = 8  # of E4M3: numbers from one power of two to the next
E8M0_MANTISSA = 1.5  # of the largest number of E2M1, which alone has such scales
EVEN_SCALES = ("fp32", "signed_fp32")  # scales that are not rounded, as far as this can tell


class Blocks(NamedTuple):
    """How a tensor is cut into blocks and scaled.

    Attributes:
        grid: of the elements; of mixed blocks INT8.
        size: elements that share a scale.
        scale: kind of the scales, see `formats.block_format`.
        rounding: of the scales: "nearest", "up" or "down".
    """

    grid: Grid
    size: int
    scale: str
    rounding: str


def clean_error(blocks: Blocks, sigma: float, center: float, absmax: float) -> float:
    """Mean squared error of a bulk N(center, sigma²) in blocks without outliers.

    Args:
        blocks: how they are scaled.
        sigma: of the bulk, ≥ 0.
        center: of the bulk, not 0 where sigma is.
        absmax: largest magnitude of the tensor, > 0; matters far from zero, where block maxima are alike.
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
    """The same without tables, with the place of the blocks' own scales in an octave."""
    unit = sigma or center
    phase = math.log2(unit if blocks.scale == "e8m0" else E4M3_MAX * unit / absmax) % 1
    if sigma == 0:
        return unit * unit * _point_error(blocks.grid, 1.0, _top(blocks, 1.0, phase))
    maxima = _block_maxima(blocks.size, center / unit)[1::3]
    return unit * unit * float(np.mean([_block_error(blocks, a, phase, center / unit) for a in maxima]))


def _at_phase(row: tuple[float, ...], phase: float) -> float:
    index = int(phase) % len(row)
    return row[index] + (phase - int(phase)) * (row[(index + 1) % len(row)] - row[index])


@functools.lru_cache(maxsize=32)
def largest_error(blocks: Blocks) -> float:
    """Mean squared error of a block's largest element over its square, from the rounding of its scale."""
    if blocks.scale in EVEN_SCALES:
        return 0.0
    tops = [_top(blocks, 1.0, i / PHASES) for i in range(PHASES)]
    return float(np.mean([_point_error(blocks.grid, 1.0, top) for top in tops]))


def widening(blocks: Blocks) -> float:
    """How far, in the geometric mean, a scale's rounding stretches the grid beyond the block's maximum."""
    if blocks.scale != "e8m0":
        return 1.0
    return math.sqrt(2) if blocks.rounding == "up" else E8M0_MANTISSA / math.sqrt(2)


@functools.lru_cache(maxsize=256)
def _clean_row(blocks: Blocks, row: int) -> tuple[float, ...]:
    """log₂ of the error of N(c, 1) by the place of sigma in an octave, or one number where it is alike."""
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
    """What the format's largest number stands for in a block whose largest magnitude is `largest`.

    Args:
        blocks: how scales are rounded.
        largest: in units in which sigma is 1.
        phase: log₂ of that unit, or of its place under the tensor's scale; its fraction matters.
    """
    if blocks.scale in EVEN_SCALES:
        return largest
    if blocks.scale == "e4m3":
        unit = 2.0**phase
        mantissa, exponent = math.frexp(largest * unit)
        steps = mantissa * 2 * MANTISSA_STEPS
        steps = math.ceil(steps) if blocks.rounding == "up" else round(steps)
        return math.ldexp(steps / (2 * MANTISSA_STEPS), exponent) / unit
    # What a power of two scales: the format's largest number is 1.5 · 2² (E2M1), so tops are 1.5 · 2^k.
    power = math.log2(largest / E8M0_MANTISSA) + phase
    if blocks.rounding == "up":
        return E8M0_MANTISSA * 2.0 ** (math.ceil(power) - phase)
    return E8M0_MANTISSA * 2.0 ** (math.floor(math.log2(largest) + phase) - phase)
