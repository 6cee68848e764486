"""Blocks of INT8 or E5M2 by the book: block by block, in fractions and float64; no code of the package."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

F = np.float32
LARGEST = {"int8": 127, "e5m2": 57344}


def int8_code(value: float, random: int | None = None) -> int:
    """Code of a number already scaled: magnitude in seven bits, sign above."""
    magnitude = abs(float(value))
    magnitude = np.rint(magnitude) if random is None else stepped(magnitude, random)  # half to even
    return int(min(magnitude, 127)) | (128 if np.signbit(value) else 0)


def e5m2_code(value: float, random: int | None = None) -> int:
    """The same in E5M2, whose codes are the upper bytes of fp16 numbers."""
    magnitude = min(abs(float(value)), 57344.0)
    gap = 2.0 ** (max(math.frexp(magnitude)[1] - 1, -14) - 2)
    steps = magnitude / gap
    steps = np.rint(steps) if random is None else stepped(steps, random)
    bits = int(np.float16(min(steps * gap, 57344.0)).view(np.uint16))
    assert bits % 256 == 0
    return bits >> 8 | (128 if np.signbit(value) else 0)


def stepped(magnitude: float, random: int) -> int:
    """Rounded up or down by 24 random bits."""
    return math.floor(magnitude + random / 2**24)


def number(code: int, is_e5m2: bool) -> float:
    """What a code stands for."""
    if is_e5m2:
        return float(np.uint16(code << 8).view(np.float16))
    return float(code & 127) * (-1 if code & 128 else 1)


def is_near_a_step(value: float, random: int, is_e5m2: bool) -> bool:
    """Whether a code is so near to where its random number sends it up that fp32 may fall beyond that."""
    magnitude = abs(float(value))
    if is_e5m2:
        magnitude /= 2.0 ** (max(math.frexp(magnitude)[1] - 1, -14) - 2)
    total = magnitude + random / 2**24
    return abs(total - round(total)) < 1e-4


def encoded(x: np.ndarray, size: int, random: np.ndarray | None = None):
    """Signed scales (rows, blocks), codes (rows, padded columns), and where a code may be one off.

    Args:
        x: (rows, cols).
        size: elements of a block.
        random: 24 bits each (rows, padded columns), or None: nearest even.
    """
    with np.errstate(all="ignore"):
        x = x.astype(F)
    rows, cols = x.shape
    blocks = -(-cols // size)
    scales = np.zeros((rows, blocks), dtype=F)
    codes = np.zeros((rows, blocks * size), dtype=np.uint8)
    may_differ = np.zeros(codes.shape, dtype=bool)
    for row in range(rows):
        for block in range(blocks):
            start = block * size
            elements = x[row, start : min(start + size, cols)]
            scale, is_e5m2 = choose(elements)
            scales[row, block] = -scale if is_e5m2 else scale
            if np.isnan(scale):
                continue
            code = e5m2_code if is_e5m2 else int8_code
            for column, element in enumerate(elements, start):
                value = F(element / scale)
                drawn = None if random is None else random[row, column].item()
                codes[row, column] = code(value, drawn)
                may_differ[row, column] = drawn is not None and is_near_a_step(value, drawn, is_e5m2)
    return scales, codes, may_differ


def choose(elements: np.ndarray) -> tuple[np.float32, bool]:
    """Scale of a block without padding, and whether it is E5M2."""
    largest = np.abs(elements).max()
    if not np.isfinite(largest):
        return F(np.nan), False
    int8_scale, e5m2_scale = F(largest / F(127)), F(largest / F(57344))
    if int8_scale == 0:
        return F(1), False
    total = sum(int8_code(F(element / int8_scale)) & 127 for element in elements)
    others = len(elements) - 1
    is_small = total - 127 < Fraction(141, 32) * others
    if is_small and e5m2_scale >= 2.0**-126:
        return e5m2_scale, True
    return int8_scale, False


def decoded(scales: np.ndarray, codes: np.ndarray, size: int, cols: int) -> np.ndarray:
    """float64 (rows, cols): numbers times magnitudes of scales, not rounded."""
    values = np.zeros((codes.shape[0], cols))
    for row, column in np.ndindex(values.shape):
        scale = scales[row, column // size]
        values[row, column] = number(int(codes[row, column]), bool(np.signbit(scale))) * abs(float(scale))
    return values
