"""MXFP4 matrices whose products fit FP8 or do not, and the error that a product may have."""

import numpy as np
import torch

from megalowbit.layers.matmul.fp8 import DTYPES
from megalowbit.quantize.encoding import NO_EXPONENT

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
OUTPUT, GRADIENT = DTYPES["output"], DTYPES["grad_input"]
# exponents of the left and of the right operand
FITTING = {
    "near": ([-2, 0, 5], [0, -5], OUTPUT),
    "at the limit of E4M3": ([0, -14], [3, -11], OUTPUT),
    "at the limit of E5M2": ([8, -20], [0, -14], GRADIENT),
    "large": ([100, 88], [-60], GRADIENT),
}
NOT_FITTING = {
    "left beyond E4M3": ([0, -15], [0, -5], OUTPUT),
    "right beyond E4M3": ([0], [1, -14], GRADIENT),
    "left beyond E5M2": ([0, -29], [0, -5], GRADIENT),
    "both far beyond": ([0, -40], [0, -40], OUTPUT),
    "a scale below normal": ([-122], [100], OUTPUT),
    "a scale below normal, right": ([100], [-122], GRADIENT),
    "scales below normal together": ([-40], [-90], OUTPUT),
}
EVERY_SHIFT = [  # around all limits
    (torch.tensor([high, spread - high], dtype=torch.int32), torch.tensor([other, -other], dtype=torch.int32))
    for high, other in ((127, 127), (253, 40), (252, 40), (6, 200), (7, 200), (13, 200), (14, 200), (70, 69),
                        (70, 75), (70, 82), (70, 90), (233, 130), (240, 150), (250, 150))
    for spread in (0, 14, 15, 28, 29)
    if high - spread >= 0
]  # fmt: skip
EVERY_SHIFT += [(torch.tensor([NO_EXPONENT] * 2, dtype=torch.int32), right) for _, right in EVERY_SHIFT[::5]]


def spread_matrix(rows, cols, exponents, seed=0):
    """Every E2M1 magnitude in blocks whose scales run through the exponents given."""
    generator = np.random.default_rng(seed)
    blocks = -(-cols // 32)
    codes = generator.integers(0, 16, (rows, blocks, 32))
    codes[:, :, 0] = 7  # each block holds its largest element
    values = np.array([*GRID, *(-v for v in GRID)])[codes]
    scale = np.ldexp(1.0, np.resize(exponents, (rows, blocks, 1)))
    return torch.from_numpy((values * scale).reshape(rows, blocks * 32)[:, :cols].copy()).float()


def error_bound(a, b, out_dtype):
    """a b (float64), and how far a product summed in fp32 and rounded once may be from it."""
    largest = torch.finfo(out_dtype).max
    expected = (a @ b).clamp(-largest, largest)
    rounding = torch.finfo(out_dtype).eps / 2 * expected.abs() + torch.finfo(out_dtype).tiny
    return expected, 3e-6 * (a.abs() @ b.abs() + expected.abs()) + rounding
