"""Sums of quantisation counts by layer and role, on one device.

A training step produces hundreds of small tensors. Adding each to its row would take three kernels per
tensor. Instead they are collected in a list, and summed by one stack and one indexed add at the end of the
step. The rows they belong to rarely change between steps, so the index tensor is cached too.

All columns are integers, the errors as digits of exact sums (see `exact_sum`). A GPU adds the tensors of a
row in any order, because `index_add_` uses atomic operations there, and a resumed run may see its layers in
another order. Integers have the same sum in every order; float64 numbers do not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megalowbit.quantize.encoding import COUNT_NAMES, ERROR_NAMES
from megalowbit.telemetry.overflow.counters import ROLES, TABLE_NAMES
from megalowbit.telemetry.overflow.exact_sum import NUM_DIGITS, digits_of, make_scales

MAX_PENDING = 4096  # limits memory if no step is ever ended
_SATURATED = COUNT_NAMES.index("saturated")
_NONFINITE = COUNT_NAMES.index("nonfinite")


_COUNTS = len(TABLE_NAMES)
_WIDTH = _COUNTS + len(ERROR_NAMES) * NUM_DIGITS


class DeviceTable:
    """Integer sums: the columns of `TABLE_NAMES`, then the digits of each of `ERROR_NAMES`.

    There are two tables: of the step that is running, and of the steps finished since `take_run`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._row_of: dict[tuple[str, str], int] = {}
        self._pending: list[tuple[int, Tensor, Tensor]] = []
        self._index_rows: list[int] = []
        self._index = torch.empty(0, dtype=torch.int64, device=device)
        self._role_index = torch.empty(0, dtype=torch.int64, device=device)  # (rows,), into ROLES
        self._scales = make_scales(device)
        self._place_values = self._scales[:-1].reciprocal()  # (18,) float64; powers of two, so exact
        self._step, self._run = self._zeros(0), self._zeros(0)

    def append(self, layer: str, role: str, counts: Tensor, error: Tensor) -> None:
        """Record one quantisation; the tensors are stored without a copy."""
        row = self._row_of.setdefault((layer, role), len(self._row_of))
        self._pending.append((row, counts, error))
        if len(self._pending) >= MAX_PENDING:
            self._fold()

    def drop_step(self) -> None:
        """Discard the current step."""
        self._pending.clear()
        self._step.zero_()

    def close_step(self) -> None:
        """Add the running step to the run and start the next."""
        self._fold()
        self._run.add_(self._step)
        self._step.zero_()

    def step_by_role(self) -> tuple[Tensor, Tensor]:
        """Sums of the running step in the order of `ROLES`: (3, 11) int64 and (3, 2) float64.

        They do not depend on the order of layers or additions: errors are rounded after they are summed.
        """
        self._fold()
        sums = self._zeros(len(ROLES)).index_add_(0, self._role_index, self._step)
        digits = sums[:, _COUNTS:].unflatten(1, (len(ERROR_NAMES), NUM_DIGITS))
        return sums[:, :_COUNTS], (digits * self._place_values).sum(dim=-1)

    def take_run(self) -> Iterator[tuple[tuple[str, str], list[int]]]:
        """Read the sums of the finished steps to the host, row by row, and set them to zero.

        Yields:
            Layer and role; the columns of `TABLE_NAMES`, then the digits of each of `ERROR_NAMES`.
        """
        rows = self._run.tolist()
        self._run.zero_()
        # a layer first seen in the current step has no row yet: zip ends before it
        yield from zip(self._row_of, rows, strict=False)

    def _fold(self) -> None:
        """Add the pending tensors to the current step."""
        self._grow()
        if not self._pending:
            return
        rows = [row for row, _, _ in self._pending]
        if rows != self._index_rows:
            self._index_rows, self._index = rows, self._upload(rows)
        counts = torch.stack([counts for _, counts, _ in self._pending])  # (n, 8)
        errors = torch.stack([error for _, _, error in self._pending])  # (n, 2)
        self._pending.clear()
        is_nonfinite = counts[:, _NONFINITE : _NONFINITE + 1] > 0  # (n, 1)
        has_overflow = counts[:, _SATURATED : _SATURATED + 1] > 0
        operations = torch.cat([~is_nonfinite, has_overflow & ~is_nonfinite, is_nonfinite], dim=1)  # (n, 3)
        nonfinite = counts[:, _NONFINITE].clone()
        counts = counts.masked_fill(is_nonfinite, 0)
        counts[:, _NONFINITE] = nonfinite
        digits = digits_of(errors.masked_fill(is_nonfinite, 0.0), self._scales).flatten(1)  # (n, 36)
        self._step.index_add_(0, self._index, torch.cat([counts, operations.long(), digits], dim=1))

    def _grow(self) -> None:
        """Add a row for each layer and role that is new since the last fold."""
        missing = len(self._row_of) - len(self._step)
        if missing == 0:
            return
        self._role_index = self._upload([ROLES.index(role) for _, role in self._row_of])
        self._step, self._run = (
            torch.cat([table, self._zeros(missing)]) for table in (self._step, self._run)
        )

    def _zeros(self, rows: int) -> Tensor:
        return torch.zeros(rows, _WIDTH, dtype=torch.int64, device=self.device)

    def _upload(self, numbers: list[int]) -> Tensor:
        """Whole numbers as int64 on the device; from pinned memory, so the host does not wait for a GPU."""
        if self.device.type != "cuda":
            return torch.tensor(numbers, device=self.device)
        return torch.tensor(numbers, pin_memory=True).to(self.device, non_blocking=True)
