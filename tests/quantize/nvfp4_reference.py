"""NVFP4 by the book: Python loops over blocks, float64, its own E4M3, fp32 roundings in order."""

import math

import numpy as np

THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between codes 0|1, 1|2, …; ties to the even code
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = [
    m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    for e in range(16)
    for m in range(8)
    if (e, m) != (15, 7)
]


def nearest_e2m1(y: float) -> float:
    magnitude, code = abs(y), 0
    for lower, threshold in enumerate(THRESHOLDS):
        if magnitude > threshold or (magnitude == threshold and lower % 2 == 1):
            code = lower + 1
    return math.copysign(GRID[code], y)


def nearest_e4m3(x: float) -> float:
    return E4M3[min(range(len(E4M3)), key=lambda code: (abs(E4M3[code] - x), code % 2))]


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Element values, block scales (both float64, exact) and the tensor's decode factor of a 2-D array."""
    f = np.float32
    x = x.astype(np.float32)
    largest = np.abs(x).max() if x.size else f(0)
    encode = f(1) if largest == 0 else f(min(f(2688) / largest, f(2.0**126)))
    rows, cols = x.shape
    elements = np.zeros((rows, cols))
    scales = np.zeros((rows, -(-cols // 16)))
    for row in range(rows):
        for block in range(scales.shape[1]):
            part = x[row, 16 * block : 16 * block + 16]
            scale = nearest_e4m3(min(float(f(np.abs(part).max()) / (f(6) / encode)), 448.0))
            scales[row, block] = scale
            for offset, value in enumerate(part):
                y = f(value * (encode / f(scale))) if scale else f(0)
                elements[row, 16 * block + offset] = nearest_e2m1(float(y))
    return elements, scales, float(f(1) / encode)


def operand(x: np.ndarray) -> tuple[np.ndarray, float]:
    """Elements × block scales in float64, and the tensor's decode factor."""
    elements, scales, tensor_scale = quantize(x)
    return elements * np.repeat(scales, 16, axis=1)[:, : x.shape[1]], tensor_scale


def dequantized(x: np.ndarray) -> np.ndarray:
    values, tensor_scale = operand(x)
    return values * tensor_scale
