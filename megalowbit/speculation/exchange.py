"""What all ranks have seen in a step that was looked at, pooled alike on each of them, and read once.

Ranks agree once on the layers there are, for pipeline stages hold different ones, and on settings. At a look
each lays out its findings alike, zeros where it has none, and two small all-reduces pool them: MAX of the
largest magnitudes, SUM of the rest, weighted by the number of elements. Center and spread become those of the
mixture of the ranks' bulks; operands that several ranks hold alike count several times, which moves no mean.
One NaN or infinity anywhere makes an operand's sums not finite on all ranks.

Each packet carries a fingerprint of the decisions in force: were ranks ever to disagree (different machines
round logarithms differently), the next look says so instead of letting products drift apart.
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

from megalowbit.distributed import process_group
from megalowbit.errors import UserError, shown
from megalowbit.speculation.precisions import PRODUCTS
from megalowbit.speculation.probe import ENERGIES, ROLES, RankFindings
from megalowbit.speculation.statistics import COLUMNS, OperandStatistics

MOMENTS = ("count", "center", "square", "power", "bulk_power", "outlier_share")  # all but the first × count
SIDES = 2  # left and right operand of a product
HIGHEST_DB = 100.0  # of a measurement: beyond it the reference itself is not exact
_FINGERPRINT_BITS = 48  # a float64 holds them


class Verification(NamedTuple):
    """Energies of a product's compared entries, summed over ranks; see `probe`."""

    signal: float
    noise: float
    expected: float

    @property
    def measured_db(self) -> float:
        """Signal over noise, `HIGHEST_DB` at most; NaN without a signal, or where a number is not finite."""
        if not (math.isfinite(self.noise) and 0 < self.signal < math.inf):
            return math.nan
        if self.noise == 0:
            return HIGHEST_DB
        return min(HIGHEST_DB, 10 * (math.log10(self.signal) - math.log10(self.noise)))

    @property
    def alignment_db(self) -> float:
        """Signal over that of independent operands with the same power; NaN where either is not a number."""
        if not (0 < self.signal < math.inf and 0 < self.expected < math.inf):
            return math.nan
        return 10 * (math.log10(self.signal) - math.log10(self.expected))


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What all ranks have seen; the same on each.

    Attributes:
        statistics: (layer, role) → of operands seen anywhere in the step.
        verified: (layer, product) → of products verified anywhere.
        ran: (layer, product) that anybody computed in the step.
        unquantized: (layer, product) → whether recipes leave its left and right operand as they are.
    """

    statistics: Mapping[tuple[str, str], OperandStatistics]
    verified: Mapping[tuple[str, str], Verification]
    ran: frozenset[tuple[str, str]]
    unquantized: Mapping[tuple[str, str], tuple[bool, bool]]


class Exchange:
    """Pools findings over ranks; making one is collective, as is `pool`.

    Args:
        layers: names of this rank's layers; may be empty.
        settings: what all ranks must have alike, plain values by name.
        group: ranks that decide together; `None`: all.
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
        group: dist.ProcessGroup | None = None,
        *,
        problem: str | None = None,
    ) -> None:
        self._group = group
        mine = (list(layers), dict(settings), problem)
        everyone = [mine] * process_group.world_size(group)
        if len(everyone) > 1:
            dist.all_gather_object(everyone, mine, group=group)
        for _, _, told in everyone:
            if told is not None:
                raise _on_all_ranks(told)
        for rank, (_, theirs, _) in enumerate(everyone):
            _check_alike(everyone[0][1], theirs, rank)
        self.layers = tuple(dict.fromkeys(name for names, _, _ in everyone for name in names))
        self._operands = [(layer, role) for layer in self.layers for role in ROLES]
        self._products = [(layer, product) for layer in self.layers for product in PRODUCTS]
        if not self.layers:
            raise _on_all_ranks(
                "the model has no BitLinear layer whose precision could be chosen: "
                "call megalowbit.convert(model, recipe) first, or leave speculation out"
            )

    def pool(
        self,
        sheet: RankFindings,
        unquantized: Mapping[tuple[str, str], tuple[bool, bool]],
        decisions: Iterable[str],
        device: torch.device,
    ) -> Findings:
        """Sum a look's findings over all ranks: two small all-reduces and one host read; collective.

        Args:
            sheet: of this rank.
            unquantized: as in `Findings`, of this rank's layers.
            decisions: in force during the step, in one order on all ranks.
            device: where this rank's layers are.

        Raises:
            RuntimeError: ranks have decided differently before.
        """
        device = process_group.exchange_device(self._group, device)
        statistics = _rows(self._operands, sheet.statistics, len(COLUMNS), device)
        of = dict(zip(COLUMNS, statistics.unbind(1), strict=True))
        energies = _rows(self._products, sheet.energies, len(ENERGIES), device)
        sums = torch.cat([_moments(of), energies.flatten()])
        # NaN, which a library's MAX may drop, is told by the sums
        magnitudes = of["absmax"].nan_to_num(nan=0.0)
        maxima = torch.cat([magnitudes, self._flags(sheet, unquantized, decisions).to(device)])
        if process_group.world_size(self._group) > 1:
            dist.all_reduce(sums, group=self._group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._group)
        numbers = torch.cat([sums, maxima]).tolist()
        return self._findings(numbers[: len(sums)], numbers[len(sums) :])

    def _flags(
        self,
        sheet: RankFindings,
        unquantized: Mapping[tuple[str, str], tuple[bool, bool]],
        decisions: Iterable[str],
    ) -> Tensor:
        """What needs no device, to be maximised: what ran, sides left alone, the fingerprint both ways."""
        flags: list[float] = []
        for key in self._products:
            ran, is_verified = key in sheet.energies, sheet.energies.get(key) is not None
            flags += [ran, is_verified, *unquantized.get(key, (False, False))]
        digest = hashlib.blake2b("\n".join(decisions).encode(), digest_size=_FINGERPRINT_BITS // 8).digest()
        fingerprint = float(int.from_bytes(digest, "little"))
        return torch.tensor([*flags, fingerprint, -fingerprint], dtype=torch.float64, device="cpu")

    def _findings(self, sums: list[float], maxima: list[float]) -> Findings:
        if maxima[-2] != -maxima[-1]:
            raise RuntimeError(
                "ranks have chosen different precisions for the same products: decisions must be functions "
                "of what all ranks share; run all ranks on machines of one kind"
            )
        operands, products = self._operands, self._products
        width, split = len(MOMENTS), len(MOMENTS) * len(operands)
        moments = [sums[start : start + width] for start in range(0, split, width)]
        energies = [sums[start : start + len(ENERGIES)] for start in range(split, len(sums), len(ENERGIES))]
        magnitudes, rest = maxima[: len(operands)], maxima[len(operands) : -2]
        flags = [rest[start : start + 2 + SIDES] for start in range(0, len(rest), 2 + SIDES)]
        return Findings(
            statistics={
                key: pooled(row, absmax)
                for key, row, absmax in zip(operands, moments, magnitudes, strict=True)
                if row[0] != 0
            },
            verified={
                key: Verification(*row)
                for key, row, flag in zip(products, energies, flags, strict=True)
                if flag[1]
            },
            ran=frozenset(key for key, flag in zip(products, flags, strict=True) if flag[0]),
            unquantized={
                key: (bool(flag[2]), bool(flag[3])) for key, flag in zip(products, flags, strict=True)
            },
        )


def pooled(moments: Sequence[float], absmax: float) -> OperandStatistics:
    """Statistics of operands together, from their summed `MOMENTS`, the first of which is not zero.

    All but the count are NaN where a number is not finite.
    """
    count = moments[0]
    if not all(map(math.isfinite, (*moments, absmax))):
        rest = dict.fromkeys(COLUMNS[1:], math.nan)
        return OperandStatistics(count=count, **rest)
    center, square, power, bulk_power, outlier_share = (moment / count for moment in moments[1:])
    return OperandStatistics(
        count=count,
        absmax=absmax,
        center=center,
        sigma=math.sqrt(max(0.0, square - center * center)),
        power=power,
        bulk_power=bulk_power,
        outlier_share=outlier_share,
    )


def _rows(
    keys: Iterable[tuple[str, str]],
    found: Mapping[tuple[str, str], Tensor | None],
    columns: int,
    device: torch.device,
) -> Tensor:
    """What was found for each key, float64 (keys, columns); zeros where nothing was."""
    nothing = torch.zeros(columns, dtype=torch.float64, device=device)
    rows = [found.get(key) for key in keys]
    return torch.stack([nothing if row is None else row.to(device) for row in rows])


def _moments(of: Mapping[str, Tensor]) -> Tensor:
    """(operands · moments,) float64 to be summed, operand by operand."""
    weighted = [
        of["center"],
        of["sigma"].square() + of["center"].square(),
        of["power"],
        of["bulk_power"],
        of["outlier_share"],
    ]
    return torch.stack([of["count"], *(of["count"] * each for each in weighted)], dim=1).flatten()


def _check_alike(first: Mapping[str, object], theirs: Mapping[str, object], rank: int) -> None:
    """Refuse settings of a rank that are not those of rank 0."""
    for name in first.keys() | theirs.keys():
        if first.get(name) != theirs.get(name):
            raise _on_all_ranks(
                f"speculation.{name} is {shown(theirs.get(name))} on rank {rank} and "
                f"{shown(first.get(name))} on rank 0: give all ranks the same settings"
            )


def _on_all_ranks(message: str) -> UserError:
    error = UserError(message)
    error.is_on_all_ranks = True
    return error
