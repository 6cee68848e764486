"""What a look at a model's products found and decided, as plain values.

A look happens on some optimizer steps only; a `SpeculationReport` tells of one, `SpeculationTotals` of all
steps so far. Nothing here holds a tensor: both are written to files and compared between ranks.
Signal-to-noise ratios are in decibels, ratios of magnitudes (`left_ratio`, `right_ratio`) plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class GemmRow:
    """One product of one layer in a step that was looked at, at the precision it ran at in that step.

    Attributes:
        layer: the layer's name.
        product: "output", "grad_input" or "grad_weight".
        precision: what it ran at in this step; a `Change` says what follows.
        predicted_db: signal-to-noise ratio foretold for `precision` from this step's statistics, the
            alignment and the correction known before the step; `None` at bf16, and where statistics were not
            finite.
        measured_db: the ratio found by verification; `None` where nothing was verified, at bf16, and where
            there was no signal, or no finite number to measure.
        is_hit: whether the measured ratio reached the threshold of `precision`; `None` where nothing was
            verified, at bf16, and where there was no signal.
        reason: why it ran at `precision`.
        left_ratio: largest magnitude over sigma of the bulk, of the left operand; `None` without a sigma.
        right_ratio: likewise of the right operand.
    """

    layer: str
    product: str
    precision: str
    predicted_db: float | None = None
    measured_db: float | None = None
    is_hit: bool | None = None
    reason: str = ""
    left_ratio: float | None = None
    right_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A product that runs at another precision from the next step on.

    Attributes:
        layer: the layer's name.
        product: "output", "grad_input" or "grad_weight".
        before: precision of this step.
        after: precision from the next step on.
        reason: why.
        predicted_db: signal-to-noise ratio foretold for `after`; `None` as in `GemmRow`.
    """

    layer: str
    product: str
    before: str
    after: str
    reason: str
    predicted_db: float | None = None


@dataclass(frozen=True, kw_only=True)
class SpeculationReport:
    """What one look found; the same on all ranks.

    Attributes:
        step: the optimizer step looked at, counted from 0.
        rows: every product that ran in this step, layers in the model's order.
        changes: products that run at another precision from the next step on.
        shares: precision → share of the products that ran at it in this step; the whole ladder.
        hits: verified products of this look that reached their threshold.
        misses: verified products of this look that did not.
    """

    step: int
    rows: tuple[GemmRow, ...]
    changes: tuple[Change, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0


@dataclass(frozen=True, kw_only=True)
class SpeculationTotals:
    """All steps so far, each product of each step counted once.

    Attributes:
        shares: precision → mean share of products that ran at it.
        share_8bit: mean share of products that ran at 8 bits or fewer.
        hits: verified products that reached their threshold.
        misses: verified products that did not.
        changes: changes of precision.
        rollbacks: changes made because of a miss.
    """

    shares: Mapping[str, float]
    share_8bit: float
    hits: int = 0
    misses: int = 0
    changes: int = 0
    rollbacks: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of verified products that reached their threshold; `None` where none was verified."""
        verified = self.hits + self.misses
        return self.hits / verified if verified else None
