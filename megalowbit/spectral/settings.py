"""Settings of splits into a low-rank part and a residual, which are part of a recipe.

`OperandSplit` splits an operand of a product at each use: M ≈ Q(U)·S·Q(Vᵀ) + Q(residual). `ParameterSplit`
replaces a weight by the parameters W_R, U, S, V between two optimizer steps. Both are blocks of the
configuration; docs/spectral.md maps Metis's command line to their fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.quantize.names import quantizer
from megalowbit.spectral.gains import gain

WARM_METHODS = ("qb", "power")
_BY_ALL = ("method", "broadcast_dim")
_BY_FACTORS = (*_BY_ALL, "rank", "refresh_every", "reuse", "order", "q_factors", "gains")
# The fields that each method uses; all others must have their defaults.
FIELDS_READ = MappingProxyType(
    {
        "qb": (*_BY_FACTORS, "niter", "power_every"),
        "power": (*_BY_FACTORS, "niter"),
        "svd_lowrank": (*_BY_FACTORS, "niter"),
        "svd": _BY_FACTORS,
        "sampled": (*_BY_FACTORS, "sample_fraction"),
        "random": _BY_FACTORS,
        "channels": _BY_FACTORS,
        "mean": _BY_ALL,
    }
)
METHODS = tuple(FIELDS_READ)
ORDERS = ("compensated", "seed")
REUSES = ("directions", "factors")
OPTIMIZER_STATES = ("project", "reset")
Settings = TypeVar("Settings", "OperandSplit", "ParameterSplit")


@dataclass(frozen=True, kw_only=True)
class OperandSplit:
    """The low-rank split of one operand; only fields that the method uses may be set.

    Attributes:
        method: how factors are computed: "qb" (warm start, Cholesky QR), "power" (warm start, Householder QR,
            `niter` steps each time), "svd_lowrank" (randomised, `niter` power steps), "svd" (exact),
            "sampled" (from a few rows), "random" (random projection), "channels" (the columns with the
            largest norms), or "mean" (only the mean row).
        rank: columns of U and V: an integer ≥ 1, or a fraction of the smaller of the layer's two sizes, above
            0 and up to 1.0.
        niter: power steps; for "qb" those of a cold start.
        power_every: for "qb": interval, in refreshes, of one additional power step; 0: never.
        sample_fraction: for "sampled": share of the rows in the sample.
        refresh_every: minimum number of micro-batches from one factorisation to the next; the first use after
            that computes new factors. A weight quantised once a step is used once in all its micro-batches.
        reuse: used in between: "directions" (V; U and S are computed from the new matrix) or "factors" (all
            three, as Metis does).
        broadcast_dim: axis of the operand: only its first slice is factored, and the low-rank part is
            subtracted from all slices. `None`: factor the full operand.
        order: compute the residual against the quantised factors ("compensated") or, as in the Metis
            repository, against the unquantised ones ("seed").
        q_factors: quantizer of Uᵀ and Vᵀ, with blocks along their long axes; "fp32" does not quantise them.
        gains: gain on singular values and residual: "none", "ysche", "ysche_seed", "module:function".

    Raises:
        UserError: a value is wrong, values contradict each other, or one has no effect with the method.
    """

    method: Literal["qb", "power", "svd_lowrank", "svd", "sampled", "random", "channels", "mean"] = "qb"
    rank: int | float = 0.015
    niter: int = 2
    power_every: int = 8
    sample_fraction: float = 0.02
    refresh_every: int = 1
    reuse: Literal["directions", "factors"] = "directions"
    broadcast_dim: int | None = None
    order: Literal["compensated", "seed"] = "compensated"
    q_factors: str = "nvfp4e2m1bnosr"
    gains: str = "none"

    def __post_init__(self) -> None:
        for field, choices in (("method", METHODS), ("order", ORDERS), ("reuse", REUSES)):
            _check_choice(field, getattr(self, field), choices)
        check_rank(self.rank)
        _check_whole("niter", self.niter, least=0)
        _check_whole("power_every", self.power_every, least=0)
        _check_whole("refresh_every", self.refresh_every, least=1)
        if self.broadcast_dim is not None:
            _check_whole("broadcast_dim", self.broadcast_dim, least=0)
        if not _is_number(self.sample_fraction) or not 0 < self.sample_fraction <= 1:
            raise UserError(f"split sample_fraction = {shown(self.sample_fraction)}: expected 0 < number ≤ 1")
        if not isinstance(self.q_factors, str):
            raise UserError(f"split q_factors = {shown(self.q_factors)}: expected a quantizer name")
        quantizer(self.q_factors)
        gain(self.gains)
        self._check_combination()

    def _check_combination(self) -> None:
        if self.method == "power" and self.niter == 0:
            raise UserError(
                'split niter = 0 does not change the start directions of method "power": set 1 or more'
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in FIELDS_READ[self.method] and value != each.default:
                raise UserError(
                    f'split {each.name} = {shown(value)} has no effect with method "{self.method}": remove it'
                )
        if self.reuse != "directions" and self.refresh_every == 1:
            raise UserError(
                f"split reuse = {shown(self.reuse)} has no effect with refresh_every 1: remove it, or set "
                "refresh_every to 2 or more"
            )

    def rank_of(self, in_features: int, out_features: int) -> int:
        """Number of columns of U and V in a layer of these sizes."""
        if self.method == "mean":
            return 1
        return resolve_rank(self.rank, in_features, out_features)


@dataclass(frozen=True, kw_only=True)
class ParameterSplit:
    """The split of weights into parameters: W → W_R + U·S·Vᵀ, between two optimizer steps.

    Attributes:
        rank: as for `OperandSplit`.
        warmup_steps: optimizer steps before the first split.
        merge_steps: steps from one split to the next, which splits the full W_R + U·S·Vᵀ again; 0: never.
        optimizer_state: moments after a split: "project" (by the chain rule) or "reset" (to zero).
        merged_lr: peak learning rate of the schedule from the first split on; `None`: unchanged.

    Raises:
        UserError: a value is invalid.
    """

    rank: int | float = 0.015
    warmup_steps: int = 0
    merge_steps: int = 0
    optimizer_state: Literal["project", "reset"] = "project"
    merged_lr: float | None = None

    def __post_init__(self) -> None:
        check_rank(self.rank)
        _check_whole("warmup_steps", self.warmup_steps, least=0)
        _check_whole("merge_steps", self.merge_steps, least=0)
        _check_choice("optimizer_state", self.optimizer_state, OPTIMIZER_STATES)
        if self.merged_lr is not None and not (_is_number(self.merged_lr) and self.merged_lr > 0):
            raise UserError(f"split merged_lr = {shown(self.merged_lr)}: expected a number > 0, or null")

    def rank_of(self, in_features: int, out_features: int) -> int:
        """Number of columns of U and V in a layer of these sizes."""
        return resolve_rank(self.rank, in_features, out_features)

    def is_due(self, step: int) -> bool:
        """Whether to split weights before optimizer step `step`, counted from 0."""
        since = step - self.warmup_steps
        return since == 0 or (since > 0 and self.merge_steps > 0 and since % self.merge_steps == 0)


def settings_from(kind: type[Settings], value: object, field: str) -> Settings | None:
    """Read a split from a configuration: `null`, an object with its fields, or an instance of `kind`.

    Messages begin with `field`, the key of the split.

    Raises:
        UserError: keys are unknown or values invalid.
    """
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f'{field} = {shown(value)}: expected an object such as {{"rank": 60}}, or null')
    known = [each.name for each in fields(kind)]
    for key in value:
        if key not in known:
            raise unknown_name(f"{field} key", key, known)
    values: dict[str, Any] = dict(value)
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{field}: {error}") from None


def block_over(below: OperandSplit | ParameterSplit, block: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a configuration block with the settings it is based on; the block has priority.

    Inherited fields that the block's method does not use, or that have no effect with its `refresh_every`,
    are dropped. Keys and values are not validated.
    """
    inherited = asdict(below)
    method = block.get("method", inherited.get("method"))
    if isinstance(method, str) and method in FIELDS_READ:
        inherited = {name: value for name, value in inherited.items() if name in FIELDS_READ[method]}
    both = {**inherited, **block}
    if both.get("refresh_every") == 1 and "reuse" not in block:
        both.pop("reuse", None)
    return both


def check_rank(rank: object) -> None:
    """Raise unless `rank` is a number of columns or a fraction.

    Raises:
        UserError: it is neither.
    """
    is_count = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
    is_fraction = isinstance(rank, float) and 0 < rank <= 1
    if not is_count and not is_fraction:
        raise UserError(
            f"split rank = {shown(rank)}: expected a whole number ≥ 1, or a fraction of the layer's smaller "
            "size above 0 and up to 1.0"
        )


def resolve_rank(rank: int | float, in_features: int, out_features: int) -> int:
    """Columns of U and V: the number, or the fraction of the smaller size, rounded up; at most that size."""
    smaller = min(in_features, out_features)
    wanted = rank if isinstance(rank, int) else math.ceil(rank * smaller)
    return max(1, min(wanted, smaller))


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise unknown_name(f"split {field}", value, choices)


def _check_whole(field: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"split {field} = {shown(value)}: expected a whole number ≥ {least}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
