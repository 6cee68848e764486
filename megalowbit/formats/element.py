"""Element formats: the finite set of numbers one code can stand for.

A format is described by its non-negative magnitudes in code order; the sign is one more bit above them. All
else (largest value, rounding thresholds, the map from value to position) follows from that list, so a new
sign-magnitude format is one line here. Scales, blocks and bytes belong to the other modules of this folder.

E2M1 is the four-bit element of the OCP Microscaling specification 1.0 and of NVFP4.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A sign-magnitude number format.

    Attributes:
        name: what papers call it, in lower case.
        grid: magnitudes by code, rising from 0; every gap is a power of two times the smallest gap.
    """

    name: str
    grid: tuple[float, ...]

    @property
    def max(self) -> float:
        """Largest magnitude; anything beyond it saturates."""
        return self.grid[-1]

    @property
    def sign_code(self) -> int:
        """The code bit which means "negative": 8 where the grid has 8 magnitudes."""
        return len(self.grid)

    @functools.cached_property
    def quantum(self) -> float:
        """Half the smallest gap: every threshold between two neighbours is a whole multiple of it."""
        return min(high - low for low, high in zip(self.grid, self.grid[1:], strict=False)) / 2

    @functools.cached_property
    def knots(self) -> tuple[tuple[float, float], ...]:
        """Pairs (bound, weight) with Σ weight·clamp(x, ±bound) = the real-valued code of x, signed.

        The map runs through (grid[i], i) in straight lines; it bends where the gap between neighbours
        changes.
        """
        slopes = [1 / (high - low) for low, high in zip(self.grid, self.grid[1:], strict=False)] + [0.0]
        bends = zip(self.grid[1:], slopes, slopes[1:], strict=False)
        return tuple((bound, before - after) for bound, before, after in bends if before != after)

    def code_values(self) -> list[float]:
        """The number each code stands for, sign bit included: index 9 of E2M1 is -0.5."""
        return [*self.grid, *(-magnitude for magnitude in self.grid)]

    def nearest_code(self, magnitude: float) -> int:
        """The code nearest to a non-negative number; ties go to the even code, large ones saturate.

        Plain Python and exact: fast paths read their tables off it.
        """
        code = 0
        for lower in range(len(self.grid) - 1):
            threshold = (self.grid[lower] + self.grid[lower + 1]) / 2
            if magnitude > threshold or (magnitude == threshold and lower % 2 == 1):
                code = lower + 1
        return code


E2M1 = ElementFormat(name="e2m1", grid=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
