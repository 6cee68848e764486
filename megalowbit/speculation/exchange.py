"""Combines the findings of all ranks in a check; the host reads the result once.

Ranks agree once on the settings and on the list of layers, since pipeline stages hold different ones. In a
check, all ranks arrange their findings in the same order, with zeros for missing ones. Two small all-reduces
combine them: MAX for the largest magnitudes, SUM for the rest, weighted by the number of elements. Center and
sigma become those of the mixture of the ranks' bulks. Operands that several ranks hold identically count
several times, which does not change any mean. A NaN or infinity on one rank makes an operand's sums not
finite on all.

The exchange includes a fingerprint of the decisions in force. If ranks ever disagree, for example because
their machines round logarithms differently, the next check raises an error.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import gather
from megalowbit.errors import UserError, shown
from megalowbit.speculation.precisions import PRODUCTS
from megalowbit.speculation.probe import ENERGIES, ROLES, ROUNDING, RankFindings
from megalowbit.speculation.statistics import COLUMNS, OperandStatistics

# all but the first × count; the error at each candidate follows
MOMENTS = ("count", "center", "square", "bulk_power")
SIDES = 2  # left and right operand of a product
HIGHEST_DB = 100.0  # highest measured SNR; beyond it the float64 reference is not exact enough
_FINGERPRINT_BITS = 48  # exact in a float64


class Rounding(NamedTuple):
    """Energies of a product's noise at one candidate, summed over ranks; see `probe`."""

    noise: float
    expected: float


class Verification(NamedTuple):
    """Energies of a product's compared entries, summed over ranks; see `probe`.

    Attributes:
        signal: of the exact product.
        noise: of the product of this step, minus the exact one.
        expected: the signal of independent operands.
        candidates: the noise at each candidate but the last.
    """

    signal: float
    noise: float
    expected: float
    candidates: tuple[Rounding, ...] = ()

    @property
    def measured_db(self) -> float:
        """Signal over noise, at most `HIGHEST_DB`; NaN without a signal, or if a number is not finite."""
        if not (math.isfinite(self.noise) and 0 < self.signal < math.inf):
            return math.nan
        if self.noise == 0:
            return HIGHEST_DB
        return min(HIGHEST_DB, _db(self.signal, self.noise))

    def correction_db(self, candidate: int) -> float:
        """How much higher the SNR is than for independent operands and errors; NaN if it is unknown.

        The ratio of the signal to that of independent operands, over the same ratio of the noise.
        """
        noise, expected = self.candidates[candidate]
        return _db(self.signal, self.expected) - _db(noise, expected)


def _db(energy: float, other: float) -> float:
    """A ratio of energies; NaN if one is 0 or not finite."""
    if not (0 < energy < math.inf and 0 < other < math.inf):
        return math.nan
    return 10 * (math.log10(energy) - math.log10(other))


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The combined findings of all ranks; identical on each.

    Attributes:
        statistics: (layer, role) → statistics of each operand that some rank used in the step.
        verified: (layer, product) → verification of each product that some rank verified.
        ran: each (layer, product) that some rank computed in the step.
        unquantized: (layer, product) → whether recipes leave its left and right operand unquantised.
    """

    statistics: Mapping[tuple[str, str], OperandStatistics]
    verified: Mapping[tuple[str, str], Verification]
    ran: frozenset[tuple[str, str]]
    unquantized: Mapping[tuple[str, str], tuple[bool, bool]]


class Exchange:
    """Combines findings over ranks; creating an instance is collective, and so is `pool`.

    Args:
        layers: names of this rank's layers; may be empty.
        settings: plain values by name, which must be equal on all ranks.
        candidates: number of candidates but the last.
        group: the ranks that decide together; `None`: all.
        problem: why this rank cannot take part; raised on all ranks.

    Attributes:
        layers: names of all ranks' layers, in the order of the first rank that has each.

    Raises:
        UserError: a rank has a problem or other settings, or no rank has a layer.
    """

    def __init__(
        self,
        layers: Sequence[str],
        settings: Mapping[str, object],
        candidates: int = 0,
        group: dist.ProcessGroup | None = None,
        *,
        problem: str | None = None,
    ) -> None:
        self._group = group
        self._candidates = candidates
        local = (list(layers), dict(settings), problem)
        gathered = gather(local, group)
        for _, _, problem_of_rank in gathered:
            if problem_of_rank is not None:
                raise _on_all_ranks(problem_of_rank)
        for rank, (_, settings_of_rank, _) in enumerate(gathered):
            _check_same_settings(gathered[0][1], settings_of_rank, rank)
        self.layers = tuple(dict.fromkeys(name for names, _, _ in gathered for name in names))
        self._operands = [(layer, role) for layer in self.layers for role in ROLES]
        self._products = [(layer, product) for layer in self.layers for product in PRODUCTS]
        if not self.layers:
            raise _on_all_ranks(
                "the model has no BitLinear layer to choose a precision for: "
                "call megalowbit.convert(model, recipe) first, or leave speculation out"
            )

    def pool(
        self,
        found: RankFindings,
        unquantized: Mapping[tuple[str, str], tuple[bool, bool]],
        decisions: Iterable[str],
        device: torch.device,
    ) -> Findings:
        """Combine a check's findings over all ranks: two small all-reduces and one host read; collective.

        Args:
            found: this rank's findings.
            unquantized: as in `Findings`, for this rank's layers.
            decisions: the precisions in force during the step, in the same order on all ranks.
            device: the device of this rank's layers.

        Raises:
            RuntimeError: ranks made different decisions in an earlier check.
        """
        device = process_group.exchange_device(self._group, device)
        width = len(COLUMNS) + self._candidates
        statistics = _rows(self._operands, found.statistics, width, device)
        of = dict(zip(COLUMNS, statistics.unbind(1), strict=False))
        width = len(ENERGIES) + len(ROUNDING) * self._candidates
        energies = _rows(self._products, found.energies, width, device)
        moments = _moments(of, statistics[:, len(COLUMNS) :])
        sums = torch.cat([moments.flatten(), energies.flatten()])
        # the MAX of some libraries drops NaN; the sums keep it
        magnitudes = of["absmax"].nan_to_num(nan=0.0)
        maxima = torch.cat([magnitudes, self._flags(found, unquantized, decisions).to(device)])
        if process_group.world_size(self._group) > 1:
            collectives.all_reduce(sums, group=self._group)
            collectives.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._group)
        numbers = torch.cat([sums, maxima]).tolist()
        return self._findings(numbers[: len(sums)], numbers[len(sums) :])

    def _flags(
        self,
        found: RankFindings,
        unquantized: Mapping[tuple[str, str], tuple[bool, bool]],
        decisions: Iterable[str],
    ) -> Tensor:
        """Flags for the MAX reduction: which products ran, unquantised sides, ± the fingerprint.

        With both signs, MAX gives the largest and the smallest fingerprint: all ranks agree if they are
        equal.
        """
        flags: list[float] = []
        for key in self._products:
            ran, is_verified = key in found.energies, found.energies.get(key) is not None
            flags += [ran, is_verified, *unquantized.get(key, (False, False))]
        digest = hashlib.blake2b("\n".join(decisions).encode(), digest_size=_FINGERPRINT_BITS // 8).digest()
        fingerprint = float(int.from_bytes(digest, "little"))
        return torch.tensor([*flags, fingerprint, -fingerprint], dtype=torch.float64, device="cpu")

    def _findings(self, sums: list[float], maxima: list[float]) -> Findings:
        if maxima[-2] != -maxima[-1]:
            raise RuntimeError(
                "ranks have chosen different precisions for the same products, probably because machines "
                "round differently: run all ranks on machines of one kind"
            )
        operands, products = self._operands, self._products
        width = len(MOMENTS) + self._candidates
        split = width * len(operands)
        moments = [sums[start : start + width] for start in range(0, split, width)]
        width = len(ENERGIES) + len(ROUNDING) * self._candidates
        energies = [sums[start : start + width] for start in range(split, len(sums), width)]
        magnitudes, rest = maxima[: len(operands)], maxima[len(operands) : -2]
        flags = [rest[start : start + 2 + SIDES] for start in range(0, len(rest), 2 + SIDES)]
        return Findings(
            statistics={
                key: pooled(row, absmax)
                for key, row, absmax in zip(operands, moments, magnitudes, strict=True)
                if row[0] != 0
            },
            verified={
                key: _verification(row)
                for key, row, flag in zip(products, energies, flags, strict=True)
                if flag[1]
            },
            ran=frozenset(key for key, flag in zip(products, flags, strict=True) if flag[0]),
            unquantized={
                key: (bool(flag[2]), bool(flag[3])) for key, flag in zip(products, flags, strict=True)
            },
        )


def pooled(moments: Sequence[float], absmax: float) -> OperandStatistics:
    """Statistics of several operands together, from their summed moments; the count is not zero.

    If a number is not finite, all but the count are NaN.
    """
    count = moments[0]
    if not all(map(math.isfinite, (*moments, absmax))):
        unknown = dict.fromkeys(COLUMNS[1:], math.nan)
        return OperandStatistics(count=count, errors=(), **unknown)
    center, square, bulk_power, *errors = (moment / count for moment in moments[1:])
    return OperandStatistics(
        count=count,
        absmax=absmax,
        center=center,
        sigma=math.sqrt(max(0.0, square - center * center)),
        bulk_power=bulk_power,
        errors=tuple(errors),
    )


def _verification(row: Sequence[float]) -> Verification:
    signal, noise, expected, *rounding = row
    return Verification(signal, noise, expected, tuple(map(Rounding, rounding[::2], rounding[1::2])))


def _rows(
    keys: Iterable[tuple[str, str]],
    found: Mapping[tuple[str, str], Tensor | None],
    columns: int,
    device: torch.device,
) -> Tensor:
    """The findings of each key, float64 (keys, columns); zeros for keys without findings."""
    nothing = torch.zeros(columns, dtype=torch.float64, device=device)
    rows = [found.get(key) for key in keys]
    return torch.stack([nothing if row is None else row.to(device) for row in rows])


def _moments(of: Mapping[str, Tensor], errors: Tensor) -> Tensor:
    """float64 (operands, moments): the inputs of the SUM reduction; `errors` has a row for each operand."""
    weighted = [
        of["center"],
        of["sigma"].square() + of["center"].square(),
        of["bulk_power"],
        *errors.unbind(1),
    ]
    return torch.stack([of["count"], *(of["count"] * each for each in weighted)], dim=1)


def _check_same_settings(first: Mapping[str, object], others: Mapping[str, object], rank: int) -> None:
    """Raise if the settings of a rank differ from those of rank 0."""
    for name in first.keys() | others.keys():
        if first.get(name) != others.get(name):
            raise _on_all_ranks(
                f"speculation.{name} is {shown(others.get(name))} on rank {rank} and "
                f"{shown(first.get(name))} on rank 0: give all ranks the same settings"
            )


def _on_all_ranks(message: str) -> UserError:
    error = UserError(message)
    error.is_on_all_ranks = True
    return error
