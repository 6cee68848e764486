"""Counters of saturation and underflow per layer and role, on the device.

A `GradientOverflowTracker` is the observer of quantising layers. A call in the forward or backward only
appends the counts to a list, without a kernel or host read. At the end of a step the counts are stacked and
summed by layer and role, and the sums are read once.

The *headline*, saturation of output gradients over all ranks, is six numbers in the same all-reduce as the
loss (`step_facts.py`). All other figures of a step are those of this process. The table by layer is summed
over ranks on request (`reduce_layers`), which is collective.

In a plain PyTorch loop:

    tracker = mlb.GradientOverflowTracker()
    mlb.set_observer(model, tracker)
    ...                                          # forward, backward
    print(tracker.end_step().facts())

Kernels count only for layers with an observer: `set_observer(model, tracker if step % 10 == 0 else None)`
before each step counts every tenth one.

A tensor counts once: layers report nothing when activation checkpointing recomputes a forward. Copies of it
on several tensor-parallel ranks count once per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalowbit.distributed import collectives, process_group
from megalowbit.errors import UserError
from megalowbit.quantize.encoding import ERROR_NAMES
from megalowbit.telemetry.overflow.counters import ROLES, TABLE_NAMES, LayerOverflow, OperandCounts
from megalowbit.telemetry.overflow.device_table import DeviceTable
from megalowbit.telemetry.overflow.exact_sum import NUM_DIGITS, from_float, to_float, whole
from megalowbit.telemetry.overflow.reduction import Key, sum_over_ranks

HEADLINE_NAMES = (  # of output gradients, over all ranks; the other counts stay 0 there
    "elements",
    "saturated",
    "underflow",
    "nonfinite",
    "quantizations",
    "quantizations_with_overflow",
)
_HEADLINE_COLUMNS = [TABLE_NAMES.index(name) for name in HEADLINE_NAMES]
_ROW_LENGTH = len(TABLE_NAMES) + len(ERROR_NAMES)
LOCAL_LENGTH = len(ROLES) * _ROW_LENGTH


@dataclass(frozen=True, kw_only=True)
class StepOverflow:
    """Counts of one step.

    Attributes:
        step: output gradients of this step, over all ranks; `HEADLINE_NAMES` only.
        run: the same over all counted steps of the run, this one included.
        counted_steps: number of these steps.
        roles: all counts of this step by role, of this process's own tensors and those of other stages.
    """

    step: OperandCounts
    run: OperandCounts
    counted_steps: int
    roles: dict[str, OperandCounts]

    def facts(self) -> dict[str, float | int | None]:
        """Flat facts for the sinks.

        `gradient_overflow/…` is summed over all ranks: rates of this step, totals of all counted steps.
        `quantization/<role>/…` is of this step and of the calling rank's own tensors only, with those of the
        other stages of its pipeline; in a run's files that is the main process, which writes them. A rate
        is `None` if nothing was counted.
        """
        facts: dict[str, float | int | None] = {
            "gradient_overflow/element_overflow_rate": self.step.saturation_rate,
            "gradient_overflow/batch_overflow_rate": self.step.batch_rate,
            "gradient_overflow/total_overflow_elements": self.run.saturated,
            "gradient_overflow/total_elements": self.run.elements,
            "gradient_overflow/counted_steps": self.counted_steps,
            "gradient_overflow/underflow_rate": self.step.underflow_rate,
            "gradient_overflow/nonfinite_elements": self.step.nonfinite,
        }
        for role, counts in self.roles.items():
            facts |= {f"quantization/{role}/{name}": rate for name, rate in counts.rates().items()}
        return facts


class GradientOverflowTracker:
    """Counts saturation and underflow per layer and role: this step, and over the run.

    Args:
        group: ranks whose counts are summed; `None` for all. Nothing needs to be initialised for one process.
        stages: ranks of the other stages of this rank's pipeline; figures by role are summed over them too;
            `None`: this rank has all layers.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, stages: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        self._stages = stages
        self.reset()

    def reset(self) -> None:
        """Reset all counts, including the run's totals."""
        self._tables: dict[torch.device, DeviceTable] = {}
        self._run = OperandCounts()
        self._counted_steps = 0
        # over all ranks, up to the last reduction: columns of TABLE_NAMES, then exact sums of ERROR_NAMES
        self._layers: dict[Key, list[int]] = {}

    @property
    def run(self) -> OperandCounts:
        """Headline figures over all ranks and all finished steps."""
        return self._run

    @property
    def counted_steps(self) -> int:
        """Number of finished steps."""
        return self._counted_steps

    def observe(self, layer: str, role: str, counts: Tensor, error: Tensor) -> None:
        """Record the counts of one quantisation, without waiting for the device.

        Args:
            layer: name of the layer.
            role: `"input"`, `"weight"` or `"grad_output"`.
            counts: (8,) int64 in the order of `COUNT_NAMES`. Kept until the step ends: not to be written
            again.
            error: (2,) float64 in the order of `ERROR_NAMES`, likewise.
        """
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
        table = self._tables.get(counts.device)
        if table is None:
            table = self._tables[counts.device] = DeviceTable(counts.device)
        table.append(layer, role, counts, error)

    def begin_step(self) -> None:
        """Discard counts since the end of the last step, such as those of a validation pass."""
        for table in self._tables.values():
            table.drop_step()

    def end_step(self) -> StepOverflow:
        """Finish the step: one small all-reduce if there are several ranks, and one host read.

        Every rank of the group must call it.
        """
        summed = self.pack_step()  # (6,)
        if process_group.world_size(self.group) > 1:
            summed = summed.to(process_group.exchange_device(self.group, summed.device))
            collectives.all_reduce(summed, group=self.group)
        local = self.pack_local_step()
        numbers = torch.cat([summed.to(local.device), local]).tolist()
        return self.unpack_step(numbers[: len(HEADLINE_NAMES)], numbers[len(HEADLINE_NAMES) :])

    def pack_step(self) -> Tensor:
        """This rank's part of the headline, to be summed over ranks: (6,) float64, as in `HEADLINE_NAMES`.

        Counts of a step stay below 2^53, where float64 holds integers exactly.
        """
        integers, _ = self._step_by_role()
        row = integers[ROLES.index("grad_output")].double()
        # stack, not row[list]: an index list is a blocking copy to the device
        return torch.stack([row[column] for column in _HEADLINE_COLUMNS])

    def pack_local_step(self) -> Tensor:
        """Figures by role of this rank and the other stages, not to be summed: (39,) float64."""
        integers, errors = self._step_by_role()
        figures = torch.cat([integers.double(), errors], dim=1).flatten()
        if self._stages is not None:
            figures = figures.to(process_group.exchange_device(self._stages, figures.device))
            collectives.all_reduce(figures, group=self._stages)
        return figures

    def unpack_step(self, summed: Sequence[float], local: Sequence[float]) -> StepOverflow:
        """Finish the step with numbers the caller has reduced and read: see `reduce_step_facts`.

        Args:
            summed: `pack_step` summed over the group's ranks, 6 numbers.
            local: this rank's own `pack_local_step`, 39 numbers.
        """
        if (len(summed), len(local)) != (len(HEADLINE_NAMES), LOCAL_LENGTH):
            raise ValueError(
                f"expected {len(HEADLINE_NAMES)} summed and {LOCAL_LENGTH} local numbers, "
                f"got {len(summed)} and {len(local)}"
            )
        step = OperandCounts(**{name: int(value) for name, value in zip(HEADLINE_NAMES, summed, strict=True)})
        self._run = self._run + step
        self._counted_steps += 1
        for table in self._tables.values():
            table.close_step()
        return StepOverflow(
            step=step, run=self._run, counted_steps=self._counted_steps, roles=_roles_of(local)
        )

    def reduce_layers(self) -> tuple[LayerOverflow, ...]:
        """Counts of all finished steps per layer and role, summed over the ranks; every rank must call it.

        Ranks may have seen layers in different order, or different layers. Layers come in the order of the
        first rank that knows them, roles in the order of `ROLES`.
        """
        local: dict[Key, list[int]] = {}
        for table in self._tables.values():
            for key, row in table.take_run():
                local[key] = _sum(local.get(key), row)  # a layer's operands may be on two devices
        for key, row in sum_over_ranks(local, self.group, next(iter(self._tables), torch.device("cpu"))):
            self._layers[key] = _sum(self._layers.get(key), _whole_row(row))
        first_seen = {
            layer: index for index, layer in enumerate(dict.fromkeys(layer for layer, _ in self._layers))
        }
        order = sorted(self._layers, key=lambda key: (first_seen[key[0]], ROLES.index(key[1])))
        return tuple(
            LayerOverflow(layer=key[0], role=key[1], counts=_counts_of(self._layers[key])) for key in order
        )

    def state_dict(self) -> dict[str, Any]:
        """The run's totals over all ranks, as plain numbers; every rank must call it.

        It is the same on all ranks and independent of their number; load it on every rank.
        """
        rows = [
            {
                "layer": row.layer,
                "role": row.role,
                **asdict(row.counts),
                "exact_errors": self._layers[row.layer, row.role][len(TABLE_NAMES) :],
            }
            for row in self.reduce_layers()
        ]
        return {
            "run": {name: getattr(self._run, name) for name in HEADLINE_NAMES},
            "counted_steps": self._counted_steps,
            "layers": rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; earlier counts are discarded.

        Raises:
            UserError: `state` was not written by `state_dict`.
        """
        try:
            run = OperandCounts(**state["run"])
            counted_steps = int(state.get("counted_steps", 0))  # earlier versions did not save it
            layers = {(row["layer"], row["role"]): _saved_row(row) for row in state["layers"]}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"saturation counts of the checkpoint are not readable ({error}): resume from another one"
            ) from error
        self.reset()
        self._run, self._counted_steps, self._layers = run, counted_steps, layers

    def _step_by_role(self) -> tuple[Tensor, Tensor]:
        """Sums of the step: (3, 11) int64 and (3, 2) float64, on the first device."""
        tables = list(self._tables.values()) or [DeviceTable(torch.device("cpu"))]
        integers, errors = tables[0].step_by_role()
        for table in tables[1:]:
            more_integers, more_errors = table.step_by_role()
            integers = integers + more_integers.to(integers.device)
            errors = errors + more_errors.to(errors.device)
        return integers, errors


def _roles_of(local: Sequence[float]) -> dict[str, OperandCounts]:
    """Undo `pack_local_step`."""
    rows = [local[start : start + _ROW_LENGTH] for start in range(0, LOCAL_LENGTH, _ROW_LENGTH)]
    split = len(TABLE_NAMES)
    return {
        role: OperandCounts.from_rows(row[:split], row[split:]) for role, row in zip(ROLES, rows, strict=True)
    }


def _sum(before: list[int] | None, row: list[int]) -> list[int]:
    return row if before is None else [a + b for a, b in zip(before, row, strict=True)]


def _whole_row(row: list[int]) -> list[int]:
    """Put the digits of a row's exact sums together."""
    integers, digits = row[: len(TABLE_NAMES)], row[len(TABLE_NAMES) :]
    starts = range(0, len(digits), NUM_DIGITS)
    return [*integers, *(whole(digits[start : start + NUM_DIGITS]) for start in starts)]


def _counts_of(row: list[int]) -> OperandCounts:
    split = len(TABLE_NAMES)
    return OperandCounts.from_rows(row[:split], [to_float(total) for total in row[split:]])


def _saved_row(saved: dict[str, Any]) -> list[int]:
    """A row of a state; earlier versions had rounded sums only."""
    exact = saved.get("exact_errors") or [from_float(saved[name]) for name in ERROR_NAMES]
    row = [*(int(saved[name]) for name in TABLE_NAMES), *(int(total) for total in exact)]
    _counts_of(row)  # as many as there should be
    return row
