"""How many products ran at which precision, and what looks found: the sums behind `SpeculationTotals`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from megalowbit.speculation.report import Change, SpeculationTotals
from megalowbit.speculation.settings import BITS

FEW_BITS = 8  # of "8 bits or fewer"


class PrecisionCounters:
    """Running totals: plain numbers, the same on all ranks."""

    def __init__(self) -> None:
        self._gemm_steps: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    def count_step(self, precisions: Counter[str]) -> None:
        """Take one step's number of products at each precision."""
        self._gemm_steps.update(precisions)

    def count_look(self, hits: int, misses: int, changes: Iterable[Change]) -> None:
        """Take what one look found."""
        changes = list(changes)
        rollbacks = sum(change.reason == "missed" for change in changes)
        self._sums.update(hits=hits, misses=misses, changes=len(changes), rollbacks=rollbacks)

    def totals(self, ladder: tuple[str, ...]) -> SpeculationTotals:
        """Shares of the ladder's precisions, and the sums."""
        total = sum(self._gemm_steps.values()) or 1
        return SpeculationTotals(
            shares={candidate: self._gemm_steps[candidate] / total for candidate in ladder},
            share_8bit=share_of_few_bits(self._gemm_steps) / total,
            **{name: self._sums[name] for name in ("hits", "misses", "changes", "rollbacks")},
        )

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Plain JSON values; `from_dict` gives back an equal one."""
        return {"gemm_steps": dict(self._gemm_steps), "sums": dict(self._sums)}

    @staticmethod
    def from_dict(values: Mapping[str, Mapping[str, int]]) -> PrecisionCounters:
        """Undo `to_dict`.

        Raises:
            TypeError: a total is not a number of times.
        """
        for totals in (values["gemm_steps"], values["sums"]):
            for name, count in totals.items():
                if type(count) is not int or count < 0:
                    raise TypeError(f"{name} counts {count!r} times")
        counters = PrecisionCounters()
        counters._gemm_steps.update(values["gemm_steps"])
        counters._sums.update(values["sums"])
        return counters


def share_of_few_bits(shares: Mapping[str, float]) -> float:
    """What of `shares`, by precision, is at 8 bits or fewer."""
    return sum(share for candidate, share in shares.items() if BITS[candidate] <= FEW_BITS)
