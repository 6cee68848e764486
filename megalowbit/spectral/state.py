"""The state of an operand's split between uses: directions or full factors, and counts.

All uses within a micro-batch start from the state that the previous micro-batch left. That includes a second
use of the layer (the last use determines the new state) and a replay, in which activation checkpointing
recomputes a forward. A replay must return the factors of the first time, so it does not change the state.

Known limit, shared with `layers.matmul.use_counter`: after another micro-batch has begun, a replay of an
earlier one starts from the later one's state. This cannot be detected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalowbit.errors import UserError, shown
from megalowbit.spectral.low_rank import LowRank

_COUNTED = ("cold", "warm", "reused", "qr_fallback", "misfit")
_FACTORS = ("left", "values", "right")
_KEPT_COUNTS = 32  # numbers on a device that are added at once, because each addition is a launch


@dataclass(frozen=True, eq=False)
class Kept:
    """The result of a factorisation, as far as later uses need it.

    Attributes:
        directions: (k, cols), of the last factorisation; `None`: there was none, or they are not needed.
        factors: the full factors, if they are to be reused.
        refreshes: number of factorisations since the last cold start.
        refreshed_at: micro-batch of the last factorisation; `None`: unknown, so a new one is due.
    """

    directions: Tensor | None = None
    factors: LowRank | None = None
    refreshes: int = 0
    refreshed_at: int | None = None

    def is_due(self, step: int, refresh_every: int) -> bool:
        """Whether new factors are due in micro-batch `step`.

        Counted from the last factorisation and not from the first one, because micro-batches that share a
        quantised weight split it only once a step.
        """
        if self.refreshed_at is None:
            return True
        # if micro-batches were renumbered, `step` may be before `refreshed_at`: then new factors are due
        return not 0 <= step - self.refreshed_at < refresh_every

    def fitting(self, rank: int, cols: int, matrix: Tensor) -> Kept | None:
        """This on the matrix's device, or `None` if size or dtype differ."""
        if self.directions is None:
            return None
        if self.directions.shape != (rank, cols) or self.directions.dtype != matrix.dtype:
            return None
        if self.directions.device == matrix.device:
            return self
        moved = None
        if self.factors is not None:
            moved = LowRank(*(getattr(self.factors, name).to(matrix.device) for name in _FACTORS))
        return replace(self, directions=self.directions.to(matrix.device), factors=moved)


class SplitState:
    """State of the split of one operand of one layer. Starts empty."""

    def __init__(self) -> None:
        self._current = Kept()
        self._previous = Kept()
        self._step: int | None = None
        self._counts: dict[str, int] = dict.fromkeys(_COUNTED, 0)
        self._device_fallbacks: tuple[Tensor, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Counters since the creation of this object, plus those of a loaded state.

        "cold" and "warm" factorisations (without and with start directions), "reused" factors, "qr_fallback"
        (failed Cholesky factorisations), "misfit" (the stored state did not match the matrix, so new factors
        were computed). Replays are not counted. On a GPU the host waits.
        """
        on_device = int(_sum(self._device_fallbacks)) if self._device_fallbacks else 0
        return {**self._counts, "qr_fallback": self._counts["qr_fallback"] + on_device}

    def begin(self, step: int, *, is_replay: bool) -> Kept:
        """The state that a use in micro-batch `step` starts from."""
        if not is_replay and step != self._step:
            self._previous, self._step = self._current, step
        return self._previous

    def finish(self, kept: Kept) -> None:
        """Set the new state after a use that is not a replay."""
        self._current = kept

    def count(self, what: str, number: int | Tensor = 1) -> None:
        """Increase a counter; a tensor stays on its device until `counts` is read."""
        if isinstance(number, int):
            self._counts[what] += number
        else:
            self._device_fallbacks += (number,)
            if len(self._device_fallbacks) == _KEPT_COUNTS:
                self._device_fallbacks = (_sum(self._device_fallbacks),)

    def copy(self) -> SplitState:
        """An independent copy; it shares tensors, which are never modified in place."""
        other = SplitState()
        other._current, other._previous, other._step = self._current, self._previous, self._step
        other._counts, other._device_fallbacks = dict(self._counts), self._device_fallbacks
        return other

    def state_dict(self) -> dict[str, Any]:
        """The state for the next micro-batch, and the counters: CPU tensors and integers."""
        kept = self._current
        state: dict[str, Any] = {"refreshes": kept.refreshes, "counts": self.counts}
        if kept.refreshed_at is not None:
            state["refreshed_at"] = kept.refreshed_at
        if kept.directions is not None:
            state["directions"] = kept.directions.to("cpu", copy=True)
        if kept.factors is not None:
            state.update({name: getattr(kept.factors, name).to("cpu", copy=True) for name in _FACTORS})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        If it does not match the next matrix (rank, width or dtype), it is not used, which counts as "misfit".
        Without `refreshed_at`, the next use computes new factors; without counts, the counters start at 0.

        Raises:
            UserError: the mapping was not written by `state_dict`.
        """
        _check(state)
        factors = LowRank(*(state[name] for name in _FACTORS)) if "left" in state else None
        self._current = self._previous = Kept(
            state.get("directions"), factors, state["refreshes"], state.get("refreshed_at")
        )
        self._step = None
        self._counts = {**dict.fromkeys(_COUNTED, 0), **state.get("counts", {})}
        self._device_fallbacks = ()


def _sum(numbers: tuple[Tensor, ...]) -> Tensor:
    """On the device of the last one."""
    return torch.stack([each.to(numbers[-1].device) for each in numbers]).sum()


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _check(state: object) -> None:
    remedy = "use a state written by SplitState.state_dict"
    if not isinstance(state, Mapping):
        raise UserError(f"split state is {shown(state)}: expected a mapping, {remedy}")
    for name in ("refreshes", "refreshed_at"):
        number = state.get(name)
        is_absent = name == "refreshed_at" and name not in state
        if not is_absent and not _is_whole(number):
            raise UserError(f"split state has {name} = {shown(number)}: expected a whole number, {remedy}")
    counts = state.get("counts", {})
    if not isinstance(counts, Mapping) or not all(
        name in _COUNTED and _is_whole(number) for name, number in counts.items()
    ):
        raise UserError(f"split state has counts = {shown(counts)}: expected whole numbers by kind, {remedy}")
    dimensions = {"directions": 2, "left": 2, "values": 1, "right": 2}
    unknown = [key for key in state if key not in ("refreshes", "refreshed_at", "counts", *dimensions)]
    if unknown:
        raise UserError(f"split state has an unknown key {shown(unknown[0])}: {remedy}")
    given = [name for name in _FACTORS if name in state]
    if given and (len(given) < len(_FACTORS) or "directions" not in state):
        missing = [name for name in dimensions if name not in state]
        raise UserError(f"split state lacks {', '.join(missing)}: {remedy}")
    for name, count in dimensions.items():
        value = state.get(name)
        if name in state and not (
            isinstance(value, Tensor) and value.is_floating_point() and value.ndim == count
        ):
            kind = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else shown(value)
            raise UserError(f"split state has {name} = {kind}: expected {count} dimensions, {remedy}")
    if given and len({state["left"].shape[1], *state["values"].shape, state["right"].shape[1]}) > 1:
        raise UserError(f"split state has factors of different ranks: {remedy}")
