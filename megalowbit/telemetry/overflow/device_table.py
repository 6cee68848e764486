"""Sums of quantisation counts by layer and role, on one device.

A training step produces hundreds of small tensors. Adding each to its row would take three kernels per
tensor. Instead they are collected in a list, and summed by one stack and one indexed add at the end of the
step. The rows they belong to rarely change between steps, so the index tensor is cached too.
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


class DeviceTable:
    """Integer sums in the columns of `TABLE_NAMES`, and of the errors in those of `ERROR_NAMES`.

    There are two of each: of the step that is running, whose errors are float64, and of the steps finished
    since `take_run`, whose errors are exact sums, see `exact_sum`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._row_of: dict[tuple[str, str], int] = {}
        self._pending: list[tuple[int, Tensor, Tensor]] = []
        self._index_rows: list[int] = []
        self._index = torch.empty(0, dtype=torch.int64, device=device)
        self._by_name = torch.empty(0, dtype=torch.int64, device=device)  # (rows,), by layer and role
        self._role_index = torch.empty(0, dtype=torch.int64, device=device)  # (rows,), theirs, into ROLES
        self._scales = make_scales(device)
        self._step = _zeros(0, device)
        self._run = _no_sums(0, device)

    def append(self, layer: str, role: str, counts: Tensor, error: Tensor) -> None:
        """Record one quantisation; the tensors are stored without a copy."""
        row = self._row_of.setdefault((layer, role), len(self._row_of))
        self._pending.append((row, counts, error))
        if len(self._pending) >= MAX_PENDING:
            self._fold()

    def drop_step(self) -> None:
        """Discard the current step."""
        self._pending.clear()
        for part in self._step:
            part.zero_()

    def close_step(self) -> None:
        """Add the running step to the run and start the next."""
        self._fold()
        integers, errors = self._step
        self._run[0].add_(integers)
        self._run[1].add_(digits_of(errors, self._scales))
        for part in self._step:
            part.zero_()

    def step_by_role(self) -> tuple[Tensor, Tensor]:
        """Sums of the running step in the order of `ROLES`: (3, 11) int64 and (3, 2) float64.

        Rows are added by name: a resumed run may see its layers in another order, and errors are rounded.
        """
        self._fold()
        integers, errors = _zeros(len(ROLES), self.device)
        return (
            integers.index_add_(0, self._role_index, self._step[0][self._by_name]),
            errors.index_add_(0, self._role_index, self._step[1][self._by_name]),
        )

    def take_run(self) -> Iterator[tuple[tuple[str, str], list[int]]]:
        """Read the sums of the finished steps to the host, row by row, and set them to zero.

        Yields:
            Layer and role; the columns of `TABLE_NAMES`, then the digits of each of `ERROR_NAMES`.
        """
        rows = torch.cat([self._run[0], self._run[1].flatten(1)], dim=1).tolist()
        for part in self._run:
            part.zero_()
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
        self._step[0].index_add_(0, self._index, torch.cat([counts, operations.long()], dim=1))
        self._step[1].index_add_(0, self._index, errors.masked_fill(is_nonfinite, 0.0))

    def _grow(self) -> None:
        """Add a row for each layer and role that is new since the last fold."""
        missing = len(self._row_of) - len(self._step[0])
        if missing == 0:
            return
        by_name = sorted(self._row_of)
        self._by_name = self._upload([self._row_of[key] for key in by_name])
        self._role_index = self._upload([ROLES.index(role) for _, role in by_name])
        self._step, self._run = (
            (torch.cat([integers, more[0]]), torch.cat([errors, more[1]]))
            for (integers, errors), more in (
                (self._step, _zeros(missing, self.device)),
                (self._run, _no_sums(missing, self.device)),
            )
        )

    def _upload(self, numbers: list[int]) -> Tensor:
        """Whole numbers as int64 on the device; from pinned memory, so the host does not wait for a GPU."""
        if self.device.type != "cuda":
            return torch.tensor(numbers, device=self.device)
        return torch.tensor(numbers, pin_memory=True).to(self.device, non_blocking=True)


def _zeros(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.zeros(rows, len(TABLE_NAMES), dtype=torch.int64, device=device),
        torch.zeros(rows, len(ERROR_NAMES), dtype=torch.float64, device=device),
    )


def _no_sums(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    integers, errors = _zeros(rows, device)
    return integers, errors.new_zeros(rows, len(ERROR_NAMES), NUM_DIGITS, dtype=torch.int64)
