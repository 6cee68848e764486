"""Rounding already-scaled numbers onto an element grid: nearest even, and stochastic.

Both go over small signed integers, "keys", which fit a byte and select the result from a table:

- nearest: floor(x/q) + ceil(x/q), q the format's quantum. Every threshold is a whole multiple of q, so the
  key tells below, on and above each threshold apart, and a tie is decided by the table. No float is ever
  rounded on the way, hence exact; the usual trick of adding a large constant would need one pass more and
  loses the sign.
- stochastic: the real-valued code of x (piecewise linear, knots in `ElementFormat`) is floored, and goes up
  with the probability of its fraction, which is (x - lo)/(hi - lo). Whole codes have fraction 0 and never
  move.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megalowbit.formats.element import ElementFormat


def nearest_keys(quanta: Tensor, scratch: Tensor, element: ElementFormat) -> Tensor:
    """Keys of nearest-even rounding.

    Args:
        quanta: fp32, numbers in units of `element.quantum`; content lost.
        scratch: fp32, same shape; content lost.
        element: the format.

    Returns:
        int8 of the same shape, within ±2·max/quantum; unspecified where `quanta` is NaN.
    """
    bound = element.max / element.quantum
    quanta.clamp_(-bound, bound)
    floor = torch.floor(quanta, out=scratch)
    return quanta.ceil_().add_(floor).to(torch.int8)


def stochastic_keys(scaled: Tensor, scratch: Tensor, uniform: Tensor, element: ElementFormat) -> Tensor:
    """Keys of stochastic rounding: codes with their sign, -7 … 7 for E2M1.

    The probability of going up is (x - lo)/(hi - lo), exact to 2⁻²² (the spacing of fp32 codes) and to the
    resolution of `uniform`.

    Args:
        scaled: fp32 numbers, saturated at ±`element.max`; content lost.
        scratch: fp32, same shape; content lost.
        uniform: fp32 in [0, 1), same shape; content lost.
        element: the format.

    Returns:
        int8 of the same shape; unspecified where `scaled` is NaN.
    """
    position = scratch.zero_()
    for bound, weight in element.knots[::-1]:  # falling bounds, so one number can be clamped in place
        position.add_(scaled.clamp_(-bound, bound), alpha=weight)
    floor = torch.floor(position, out=scaled)
    # ceil(fraction - u) is 1 exactly when u < fraction. (position + u would round up whole codes in fp32.)
    goes_up = torch.sub(position.sub_(floor), uniform, out=uniform).ceil_()
    return goes_up.add_(floor).to(torch.int8)


@functools.lru_cache(maxsize=64)
def nearest_key_codes(element: ElementFormat) -> tuple[int, ...]:
    """Code by key, for `nearest_keys`: entry 256 + key holds for negative keys, as bytes wrap."""
    half = element.quantum / 2
    return tuple(_signed(element, key, element.nearest_code(abs(key) * half)) for key in _byte_values())


@functools.lru_cache(maxsize=64)
def stochastic_key_codes(element: ElementFormat) -> tuple[int, ...]:
    """Code by key, for `stochastic_keys`, indexed as `nearest_key_codes`."""
    top = len(element.grid) - 1
    return tuple(_signed(element, key, min(abs(key), top)) for key in _byte_values())


def _byte_values() -> list[int]:
    return [*range(128), *range(-128, 0)]


def _signed(element: ElementFormat, key: int, code: int) -> int:
    return code | (element.sign_code if key < 0 else 0)


def round_nearest_even(x: Tensor, element: ElementFormat) -> Tensor:
    """Round to the nearest grid value, ties to the even code, saturating at ±max; NaN stays NaN.

    Args:
        x: floating numbers already divided by their scale, any shape.
        element: the format.

    Returns:
        fp32 grid values of the same shape.
    """
    scaled = x.detach().to(torch.float32)
    keys = nearest_keys(scaled / element.quantum, torch.empty_like(scaled), element)
    return _values(keys, nearest_key_codes(element), element, scaled)


def round_stochastic(x: Tensor, element: ElementFormat, uniform: Tensor) -> Tensor:
    """Round up with probability (x - lo)/(hi - lo), down otherwise, saturating at ±max; NaN stays NaN.

    Args:
        x: floating numbers already divided by their scale, any shape.
        element: the format.
        uniform: fp32 numbers in [0, 1), one for each element; x goes up where its number is below the
            fraction.

    Returns:
        fp32 grid values of the same shape.
    """
    scaled = x.detach().to(torch.float32)
    keys = stochastic_keys(scaled.clone(), torch.empty_like(scaled), uniform.clone(), element)
    return _values(keys, stochastic_key_codes(element), element, scaled)


def _values(keys: Tensor, codes: tuple[int, ...], element: ElementFormat, scaled: Tensor) -> Tensor:
    values = element.code_values()
    table = torch.tensor([values[code] for code in codes], device=keys.device)
    rounded = table[keys.to(torch.int64) & 0xFF]
    return torch.where(scaled.isnan(), scaled, rounded)
