"""Results of precision checks as plain values.

A `SpeculationReport` holds the results and decisions of one check, `SpeculationTotals` those of all steps so
far. Neither holds tensors, because both are written to files and compared between ranks. Signal-to-noise
ratios are in dB; `left_ratio` and `right_ratio` are plain ratios of magnitudes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class GemmRow:
    """One product of one layer in a step with a check.

    Attributes:
        layer: the layer's name.
        product: "output", "grad_input" or "grad_weight".
        precision: what it ran at in this step; a `Change` has the next precision.
        predicted_db: SNR predicted for `precision` from this step's statistics, with the correction known
            before the step. `None` at bf16, and if statistics were not finite.
        measured_db: SNR measured by verification. `None` at bf16, if nothing was verified, and if there was
            no signal or no finite number.
        is_hit: whether the measured SNR reached the threshold of `precision`. `None` at bf16, if nothing was
            verified, and if there was no signal.
        reason: why it ran at `precision`; see `policy.GemmState`.
        left_ratio: largest magnitude of the left operand over the σ of its bulk; `None` without a σ.
        right_ratio: the same for the right operand.
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
    """A product that changes its precision after this step.

    Attributes:
        layer: the layer's name.
        product: "output", "grad_input" or "grad_weight".
        before: precision of this step.
        after: precision from the next step on.
        reason: why; see `policy.GemmState`.
        predicted_db: SNR predicted for `after`; `None` as in `GemmRow`.
    """

    layer: str
    product: str
    before: str
    after: str
    reason: str
    predicted_db: float | None = None


@dataclass(frozen=True, kw_only=True)
class SpeculationReport:
    """Results and decisions of one check; identical on all ranks.

    Attributes:
        step: the optimizer step of the check, counted from 0.
        rows: every product that ran in this step, layers in the model's order.
        changes: products that change their precision after this step.
        shares: candidate → share of the products that ran at it in this step; includes all candidates.
        hits: verified products of this check that reached their threshold.
        misses: verified products of this check that did not.
    """

    step: int
    rows: tuple[GemmRow, ...]
    changes: tuple[Change, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0


@dataclass(frozen=True, kw_only=True)
class SpeculationTotals:
    """Totals over all steps so far; each product counts once a step.

    Attributes:
        shares: precision → mean share of the products that ran at it.
        share_8bit: mean share of the products that ran at 8 bits or fewer.
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
        """Share of verified products that reached their threshold; `None` if none was verified."""
        verified = self.hits + self.misses
        return self.hits / verified if verified else None
