"""Formats of published recipes in float64 NumPy, rounded to nearest; shares no code with the package.

Scales, and quotients by fp32 scales, are rounded to fp32 where the format says so; everything else is exact
in float64. An element is the nearest of all numbers of its format, by search.
"""

import math
from itertools import pairwise

import numpy as np

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
S1P2 = tuple(i / 4 for i in range(8))
NAMES = (
    *("mxfp8e4m3b", "mxfp8e4m3b:floor", "mxfp8e5m2b", "mxfp8e5m2b:floor"),
    *("fp8e4m3b:block128", "fp8e4m3b:tile128", "fp8e5m2b:tile128"),
    *("nvfp4e2m1bnosr:token_scale", "ue5m3fp4e2m1bnosr", "ue5m3fp4e2m1bnosr:tile16", "hif4nosr"),
    *("nvfp4e2m1bnosr:4over6_448", "nvfp4e2m1bnosr:4over6:tile16", "nvfp4e2m1bnosr:4over6:token_scale"),
)


def small_float(exponent_bits, mantissa_bits, bias, count, has_zero=True):
    """The first `count` magnitudes of a floating-point format, by code."""
    numbers = []
    for code in range(count):
        exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits
        if exponent == 0 and has_zero:
            numbers.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            numbers.append((2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits))
        assert exponent < 2**exponent_bits
    return tuple(numbers)


E4M3, E5M2 = small_float(4, 3, 7, 127), small_float(5, 2, 15, 124)
UE5M3, E6M2 = small_float(5, 3, 15, 255), small_float(6, 2, 48, 255, has_zero=False)
ELEMENTS = {"mxfp8e4m3b": E4M3, "mxfp8e5m2b": E5M2, "fp8e4m3b": E4M3, "fp8e5m2b": E5M2, "hif4nosr": S1P2}


def nearest(numbers, grid):
    """The nearest number of the grid, ties to the even code, with the sign of the argument."""
    grid = np.asarray(grid)
    distance = np.abs(np.abs(numbers)[..., None] - grid)
    closest = distance == distance.min(-1, keepdims=True)
    even = closest & (np.arange(grid.size) % 2 == 0)
    chosen = np.where(even.any(-1), even.argmax(-1), closest.argmax(-1))
    return np.copysign(grid[chosen], numbers)


def fp32(number):
    return np.float64(np.float32(number))


def bf16(number):
    """Eight significant bits, ties to even."""
    mantissa, exponent = np.frexp(number)
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def quantized(name, matrix):
    """The numbers that stand for a finite matrix, float64, blocks along the last axis."""
    base, *options = name.split(":")
    grid = ELEMENTS.get(base, E2M1)
    height, width = (16, 16) if "tile16" in options else (128, 128) if "tile128" in options else (1, 16)
    if base.startswith("mxfp8"):
        width = 32
    if "block128" in options:
        width = 128
    if base == "hif4nosr":
        width = 64
    rows, cols = matrix.shape
    padded = np.zeros((-(-rows // height) * height, -(-cols // width) * width))
    padded[:rows, :cols] = np.float32(matrix)
    result = np.zeros_like(padded)
    for i in range(0, padded.shape[0], height):
        for j in range(0, padded.shape[1], width):
            where = slice(i, i + height), slice(j, j + width)
            block, largest = padded[where], np.abs(padded[where]).max()
            if not largest:
                continue
            if base.startswith("mxfp8"):
                result[where] = _mxfp8(block, largest, grid, is_floor="floor" in options)
            elif base.startswith("fp8"):
                scale = fp32(largest / grid[-1])
                result[where] = fp32(nearest(fp32(block / scale), grid) * scale)
            elif base.startswith("ue5m3"):
                scale = nearest(fp32(largest / 6), UE5M3)
                result[where] = nearest(fp32(block * fp32(1 / scale)), E2M1) * scale
            elif base == "hif4nosr":
                result[where] = _hif4(block[0])
            else:
                row = padded[i] if "token_scale" in options else padded
                result[where] = _nvfp4(block, largest, np.abs(row).max(), options)
    return result[:rows, :cols]


def _mxfp8(block, largest, grid, is_floor):
    exponents = np.arange(-127, 128)
    if is_floor:
        exponent = exponents[exponents <= math.floor(math.log2(largest)) - math.floor(math.log2(grid[-1]))][
            -1
        ]
    else:
        exponent = exponents[grid[-1] * 2.0**exponents >= largest][0]
    return nearest(block / 2.0**exponent, grid) * 2.0**exponent


def _nvfp4(block, largest, largest_of_all, options):
    """Four-over-six or not, under a tensor scale that is a power of two."""
    is_four_over_six = any(option.startswith("4over6") for option in options)
    top = 256 if "4over6" in options else 448
    S = 2.0 ** math.floor(math.log2(top * 6 / largest_of_all))
    results = []
    for element in (6, 4) if is_four_over_six else (6,):
        scale = nearest(min(fp32(largest * S / element), 448.0), E4M3)
        values = nearest(fp32(block * fp32(S / scale)), E2M1) * scale / S if scale else 0 * block
        results.append((((values - block) ** 2).sum(), values))
    return min(results, key=lambda result: result[0])[1]


def _hif4(block):
    """A block of 64, by the published algorithm."""
    scale = nearest(bf16(np.abs(block).max() * bf16(1 / 7)), E6M2)
    inverse = bf16(1 / scale)
    values = np.zeros(64)
    for eight in range(0, 64, 8):
        first = 2 if np.abs(block[eight : eight + 8]).max() * inverse >= 4 else 1
        for four in (eight, eight + 4):
            part = block[four : four + 4]
            second = 2 if np.abs(part).max() * inverse / first >= 2 else 1
            values[four : four + 4] = nearest(part * inverse / first / second, S1P2) * first * second * scale
    return values


assert all(low < high for grid in (E4M3, E5M2, UE5M3, E6M2) for low, high in pairwise(grid))
