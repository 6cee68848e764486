"""Element formats: the finite set of numbers that a code can represent.

A format is defined by its non-negative magnitudes in code order; the bit above them is the sign. The largest
value, the rounding thresholds and the map from value to position follow from that list, so a new
sign-magnitude format is one line here. Integers are sign-magnitude too, without -128.

E2M1, E3M2, E4M3 and E5M2 are the elements of the OCP Microscaling specification 1.0 (E4M3 without its NaN,
E5M2 without its infinity and NaNs). Ternary is that of BitNet b1.58 (arXiv:2402.17764), S1P2 (quarters up to
1.75) that of HiF4 (arXiv:2602.11287).

`INT8_E5M2` means INT8 or E5M2 for a whole block, selected by the sign of the block's scale. Its `grid` is
that of INT8; code that handles `signed_fp32` scales must check the sign.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A sign-magnitude number format.

    Attributes:
        name: the usual name, in lower case.
        bits: bits of one code, including the sign.
        grid: magnitudes by code, ascending from 0; every gap is a power of two.
    """

    name: str
    bits: int
    grid: tuple[float, ...] = field(repr=False)

    @property
    def max(self) -> float:
        """Largest magnitude; larger numbers saturate."""
        return self.grid[-1]

    @property
    def sign_code(self) -> int:
        """The sign bit of a code: 8 for codes of 4 bits."""
        return 1 << (self.bits - 1)

    @functools.cached_property
    def thresholds(self) -> tuple[float, ...]:
        """Midpoints between neighbours: above the i-th is code i + 1; on it, the even code of the two."""
        return tuple((low + high) / 2 for low, high in zip(self.grid, self.grid[1:], strict=False))

    @functools.cached_property
    def knots(self) -> tuple[tuple[float, float], ...]:
        """Pairs (bound, weight) with Σ weight·min(|x|, bound) = the real-valued code of |x|.

        That code is the piecewise linear function through the points (grid[i], i). Its slope changes where
        the gap between neighbours changes.
        """
        slopes = [1 / (high - low) for low, high in zip(self.grid, self.grid[1:], strict=False)] + [0.0]
        bends = zip(self.grid[1:], slopes, slopes[1:], strict=False)
        return tuple((bound, before - after) for bound, before, after in bends if before != after)

    def code_values(self) -> list[float]:
        """The number of each code, including the sign: index 9 of E2M1 is -0.5; unused codes are NaN."""
        unused = [float("nan")] * (self.sign_code - len(self.grid))
        return [*self.grid, *unused, *(-magnitude for magnitude in self.grid), *unused]


def _float_grid(exponent_bits: int, mantissa_bits: int, count: int) -> tuple[float, ...]:
    """The first `count` magnitudes of a floating-point format with subnormals and the usual bias."""
    bias = 2 ** (exponent_bits - 1) - 1
    steps = 2**mantissa_bits
    grid = []
    for code in range(count):
        exponent, mantissa = divmod(code, steps)
        significand = mantissa / steps + (exponent > 0)
        grid.append(significand * 2.0 ** (max(exponent, 1) - bias))
    return tuple(grid)


E2M1 = ElementFormat(name="e2m1", bits=4, grid=_float_grid(2, 1, 8))
E3M2 = ElementFormat(name="e3m2", bits=6, grid=_float_grid(3, 2, 32))
E4M3 = ElementFormat(name="e4m3", bits=8, grid=_float_grid(4, 3, 127))
E5M2 = ElementFormat(name="e5m2", bits=8, grid=_float_grid(5, 2, 124))
INT8 = ElementFormat(name="int8", bits=8, grid=tuple(float(i) for i in range(128)))
INT4 = ElementFormat(name="int4", bits=4, grid=tuple(float(i) for i in range(8)))
INT8_E5M2 = ElementFormat(name="int8_e5m2", bits=8, grid=INT8.grid)
S1P2 = ElementFormat(name="s1p2", bits=4, grid=tuple(i / 4 for i in range(8)))
TERNARY = ElementFormat(name="ternary", bits=2, grid=(0.0, 1.0))

ELEMENTS = {each.name: each for each in (E2M1, E3M2, E4M3, E5M2, INT8, INT8_E5M2, INT4, S1P2, TERNARY)}
