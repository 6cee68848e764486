"""Axes: the range of some values, round numbers in it, and where a value is, as a share of the range."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

TICKS = 5
STEPS = (1, 2, 5, 10)
MARGIN = 0.05  # of the range, left free below and above the values
WIDE = (
    30.0  # largest value over median from which an axis is logarithmic: less would hide all but the largest
)


@dataclass(frozen=True)
class Axis:
    """An interval of numbers.

    Attributes:
        low: its lower end, above 0 if it is logarithmic.
        high: its upper end.
        base: of the logarithm; 0: the axis is linear.
    """

    low: float
    high: float
    base: int = 0

    def place(self, values: ArrayLike) -> NDArray[np.float64]:
        """Where values are: 0 at the lower end, 1 at the upper one."""
        low, high = self._scaled([self.low, self.high])
        return (self._scaled(values) - low) / ((high - low) or 1.0)

    def _scaled(self, values: ArrayLike) -> NDArray[np.float64]:
        numbers = np.asarray(values, dtype=np.float64)
        return np.log(numbers) if self.base else numbers

    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers within the range, and their texts."""
        if self.base:
            found = log_ticks(self.low, self.high, self.base)
            if len(found) > 1:
                return [(value, power_text(value, self.base)) for value in found]
        values = ticks(self.low, self.high)
        return [(value, number_text(value, _unit(values))) for value in values]


def axis_of(values: Iterable[float] | NDArray[np.float64], *, base: int | None = 0) -> Axis:
    """An axis for finite values, with a margin.

    Args:
        values: to be shown; others than finite ones are left out.
        base: of the logarithm; 0: linear; None: 10 if the values are above 0 and one is far above the median.
    """
    numbers = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return Axis(0.0, 1.0)
    is_positive = bool(numbers.min() > 0)
    if base is None:
        base = 10 if is_positive and numbers.max() > WIDE * np.median(numbers) else 0
    low, high = float(numbers.min()), float(numbers.max())
    if base and is_positive:
        factor = max((high / low) ** MARGIN, base**0.1)
        return Axis(low / factor, high * factor, base)
    room = MARGIN * (high - low) or abs(high) * MARGIN or 1.0
    floor = 0.0 if 0 <= low < room else low - room  # never below 0 because of the margin alone
    return Axis(floor, high + room)


def ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """Round numbers within a range, 0 included if it is inside."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in STEPS if factor * unit >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float, base: int = 10) -> list[float]:
    """Powers of `base` within a range of positive numbers, of which there are at most some eight."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / (TICKS + 3)))
    powers = [float(base) ** power for power in range(first, last + 1) if power % stride == 0]
    if base == 10 and len(powers) < 3:  # 1, 2, 5, 10 …
        powers = [
            factor * 10.0**power
            for power in range(first - 1, last + 1)
            for factor in (1, 2, 5)
            if low <= factor * 10.0**power <= high
        ]
    return powers


def number_text(value: float, unit: float = 0.0) -> str:
    """A number for people: `0.02`, `1,500`, `40k`, `2.5M`, `3e-05`.

    `unit` is the distance to the next tick: digits beyond it are left out.
    """
    if not math.isfinite(value):
        return str(value)
    if unit and abs(value) < unit * 1e-6:
        return "0"
    size = abs(value)
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= factor * (10 if letter == "k" else 1):
            return f"{value / factor:.6g}{letter}".replace("-", "−")
    if size and size < 1e-3:
        return f"{value:.3g}".replace("-", "−", 1) if value < 0 else f"{value:.3g}"
    return f"{value:,.6g}".replace("-", "−")


def power_text(value: float, base: int) -> str:
    """A tick of a logarithmic axis: `2^16` with base 2."""
    if base != 2:
        return number_text(value)
    exponent = round(math.log2(value))
    return number_text(value) if 0 <= exponent <= 6 else f"2{superscript(exponent)}"


def superscript(number: int) -> str:
    """`-12` → `⁻¹²`."""
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _unit(values: list[float]) -> float:
    return values[1] - values[0] if len(values) > 1 else 0.0
