"""Exact sums of float64 numbers, independent of their order and grouping.

A resumed run adds up the errors of its steps in other groups than an uninterrupted one, and ranks add theirs
in any order, so rounded sums would differ in their last digits. Here a number is split into 18 digits of 32
bits, from 2^-288 to 2^288. That range contains the squares of all normal bf16 numbers, and sums of 2^30 of
them. Digits are added as int64, on any device and over ranks, with headroom for 2^31 numbers. On the host
they become one Python integer, in units of 2^-288. Not supported: negative numbers. Smaller numbers are
truncated, and larger ones count as the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_DIGITS = 18
DIGIT_BITS = 32
UNIT_BITS = 288
LARGEST = 2.0**287


def make_scales(device: torch.device) -> Tensor:
    """What `digits_of` multiplies by on a device: (19,) float64, powers of two: products are exact."""
    scales = [2.0 ** (UNIT_BITS - DIGIT_BITS * place) for place in range(NUM_DIGITS + 1)]
    return torch.tensor(scales, dtype=torch.float64, device=device)


def digits_of(values: Tensor, scales: Tensor) -> Tensor:
    """Digits of finite numbers ≥ 0, lowest first: (…,) float64 → (…, 18) int64, on the same device."""
    floors = (values.clamp(max=LARGEST)[..., None] * scales).floor()  # (…, 19); the last one is 0
    return (floors[..., :-1] - floors[..., 1:] * 2.0**DIGIT_BITS).long()


def whole(digits: Sequence[int]) -> int:
    """The integer, in units of 2^-288, that sums of digits stand for."""
    return sum(digit << (DIGIT_BITS * place) for place, digit in enumerate(digits))


def to_float(total: int) -> float:
    """The float64 that is nearest to so many units."""
    return total / 2**UNIT_BITS


def from_float(value: float) -> int:
    """Units in a finite number ≥ 0, those of its fraction cut off."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * 2**UNIT_BITS // denominator
