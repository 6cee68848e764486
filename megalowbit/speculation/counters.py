"""Counters behind `SpeculationTotals`: products by precision, and the results of checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from megalowbit.speculation.report import Change, SpeculationTotals
from megalowbit.speculation.settings import BITS

FEW_BITS = 8  # as in "8 bits or fewer"


class PrecisionCounters:
    """Running totals; plain numbers, identical on all ranks."""

    def __init__(self) -> None:
        self._gemm_steps: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    def count_step(self, precisions: Counter[str]) -> None:
        """Add one step's number of products at each precision."""
        self._gemm_steps.update(precisions)

    def count_check(self, hits: int, misses: int, changes: Iterable[Change]) -> None:
        """Add the results of one check."""
        changes = list(changes)
        rollbacks = sum(change.reason == "missed" for change in changes)
        self._sums.update(hits=hits, misses=misses, changes=len(changes), rollbacks=rollbacks)

    def totals(self, candidates: tuple[str, ...]) -> SpeculationTotals:
        """The share of each candidate, and the sums."""
        total = sum(self._gemm_steps.values()) or 1
        return SpeculationTotals(
            shares={candidate: self._gemm_steps[candidate] / total for candidate in candidates},
            share_8bit=share_of_few_bits(self._gemm_steps) / total,
            **{name: self._sums[name] for name in ("hits", "misses", "changes", "rollbacks")},
        )

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Plain JSON values; `from_dict` restores equal counters."""
        return {"gemm_steps": dict(self._gemm_steps), "sums": dict(self._sums)}

    @staticmethod
    def from_dict(values: Mapping[str, Mapping[str, int]]) -> PrecisionCounters:
        """Restore the counters from `to_dict`.

        Raises:
            TypeError: a counter is not an integer ≥ 0.
        """
        for totals in (values["gemm_steps"], values["sums"]):
            for name, count in totals.items():
                if type(count) is not int or count < 0:
                    raise TypeError(f"counter {name} is {count!r}")
        counters = PrecisionCounters()
        counters._gemm_steps.update(values["gemm_steps"])
        counters._sums.update(values["sums"])
        return counters


def share_of_few_bits(shares: Mapping[str, float]) -> float:
    """The part of `shares` (by precision) at 8 bits or fewer."""
    return sum(share for candidate, share in shares.items() if BITS[candidate] <= FEW_BITS)
