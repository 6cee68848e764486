"""Counts of quantisations, and the rates derived from them.

For every tensor, a quantizer provides eight integers and two sums, see `quantize.encoding`. They are summed
here over tensors, steps and ranks, together with the number of quantisations.

Overflow means true clipping: |x| > 6·scale for E2M1, `saturated`. The older rule |x| > 3·scale counts a third
of a Gaussian as overflow. It is still available as `upper_half`.

The errors of a tensor with inf or NaN say nothing about the format, and its step is skipped anyway. For such
a quantisation only the elements that are not finite are counted, and it enters no rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megalowbit.quantize.encoding import COUNT_NAMES

OPERATION_NAMES = ("quantizations", "quantizations_with_overflow", "nonfinite_quantizations")
TABLE_NAMES = COUNT_NAMES + OPERATION_NAMES  # the integer columns of every table in this folder
ROLES = ("input", "weight", "grad_output")
CURVE_NAMES = (
    "saturation_rate",
    "underflow_rate",
    "snr_db",
)  # drawn for each layer and role; files have all rates


@dataclass(frozen=True, kw_only=True)
class OperandCounts:
    """Counts of any number of quantisations, as exact Python integers.

    The first eight are those of `quantize.encoding`. A rate is `None` if nothing was counted.

    Attributes:
        quantizations: quantisations of tensors without inf and NaN ("batches").
        quantizations_with_overflow: those of them that saturated at least one element.
        nonfinite_quantizations: quantisations of tensors with inf or NaN; no other count but `nonfinite` has
            their elements.
        squared_error: Σ(x - quantised x)².
        squared_norm: Σx².
    """

    elements: int = 0
    saturated: int = 0
    upper_half: int = 0
    underflow: int = 0
    nonfinite: int = 0
    blocks: int = 0
    saturated_scales: int = 0
    zero_blocks: int = 0
    quantizations: int = 0
    quantizations_with_overflow: int = 0
    nonfinite_quantizations: int = 0
    squared_error: float = 0.0
    squared_norm: float = 0.0

    @classmethod
    def from_rows(cls, integers: Sequence[float], errors: Sequence[float]) -> OperandCounts:
        """Build from a table row: `integers` in the columns of `TABLE_NAMES`, `errors` of `ERROR_NAMES`."""
        whole = {name: int(value) for name, value in zip(TABLE_NAMES, integers, strict=True)}
        squared_error, squared_norm = errors
        return cls(**whole, squared_error=float(squared_error), squared_norm=float(squared_norm))

    def __add__(self, other: OperandCounts) -> OperandCounts:
        names = [field.name for field in fields(self)]
        return OperandCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def saturation_rate(self) -> float | None:
        """Share of elements that were saturated."""
        return ratio(self.saturated, self.elements)

    @property
    def batch_rate(self) -> float | None:
        """Share of quantisations that saturated something."""
        return ratio(self.quantizations_with_overflow, self.quantizations)

    @property
    def underflow_rate(self) -> float | None:
        """Share of elements that were not zero and became zero."""
        return ratio(self.underflow, self.elements)

    @property
    def upper_half_rate(self) -> float | None:
        """Share of elements above half of the range."""
        return ratio(self.upper_half, self.elements)

    @property
    def scale_saturation_rate(self) -> float | None:
        """Share of blocks whose scale was saturated."""
        return ratio(self.saturated_scales, self.blocks)

    @property
    def zero_block_rate(self) -> float | None:
        """Share of blocks whose scale is zero."""
        return ratio(self.zero_blocks, self.blocks)

    @property
    def snr_db(self) -> float | None:
        """Signal to quantisation noise, 10·log10(Σx² / Σerror²) in dB; inf without error."""
        if not self.squared_norm > 0:
            return None
        if self.squared_error == 0:
            return math.inf
        return 10 * (math.log10(self.squared_norm) - math.log10(self.squared_error))

    def rates(self) -> dict[str, float | None]:
        """All rates and the signal to noise ratio, by name."""
        return {
            "saturation_rate": self.saturation_rate,
            "underflow_rate": self.underflow_rate,
            "upper_half_rate": self.upper_half_rate,
            "scale_saturation_rate": self.scale_saturation_rate,
            "zero_block_rate": self.zero_block_rate,
            "snr_db": self.snr_db,
        }


@dataclass(frozen=True, kw_only=True)
class LayerOverflow:
    """Counts of one operand of one layer."""

    layer: str
    role: str
    counts: OperandCounts

    def facts(self) -> dict[str, float | None]:
        """The rates in `CURVE_NAMES`, as `overflow/<role>/<layer>/<rate>`."""
        rates = self.counts.rates()
        return {f"overflow/{self.role}/{self.layer}/{name}": rates[name] for name in CURVE_NAMES}


def ratio(part: float, whole: float) -> float | None:
    """`part / whole`, or `None` if `whole` is 0."""
    return part / whole if whole else None
