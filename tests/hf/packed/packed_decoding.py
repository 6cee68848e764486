"""An independent decoder of packed weights: from bits, in float64, element by element of the definitions."""

import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


def e2m1(codes):
    """Bytes of two codes, the first in the low bits: (rows, bytes) → float64 (rows, 2 · bytes)."""
    codes = np.asarray(codes, dtype=np.uint8)
    nibbles = np.empty((codes.shape[0], 2 * codes.shape[1]), dtype=np.uint8)
    nibbles[:, 0::2], nibbles[:, 1::2] = codes % 16, codes // 16
    return np.where(nibbles >= 8, -1.0, 1.0) * E2M1[nibbles % 8]


def e4m3(scales):
    """E4M3 numbers from their bits: bias 7, subnormals are multiples of 2⁻⁹, no infinities."""
    bits = scales.cpu().contiguous().view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    found = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    assert not (bits & 0x80).any()
    return np.where((bits & 0x7F) == 0x7F, np.nan, found)


def e8m0(scales):
    """Powers of two from their bytes."""
    return 2.0 ** (scales.cpu().contiguous().view(torch.uint8).numpy().astype(np.float64) - 127)


def times_blocks(values, scales):
    """(rows, columns) times (rows, blocks)."""
    return values * np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)
