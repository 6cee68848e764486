"""The end of a run on one screen, and the same in `summary.json`.

`RunTotals` sums steps, tokens and time over the run, and is part of its checkpoints. `RunSummary` is the
result at the end, with the saturation totals and, for each role, the worst layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalowbit.durable_files import atomic_file
from megalowbit.telemetry import columns
from megalowbit.telemetry.facts import Fact
from megalowbit.telemetry.overflow.counters import ROLES, LayerOverflow, OperandCounts
from megalowbit.telemetry.sinks.jsonl import json_ready
from megalowbit.values import counted

WIDTH = 80
_LAYER_WIDTH = 36
LABELS = MappingProxyType({"saturation": "saturated", "snr_db": "SNR"})  # of measures on the console
Row = tuple[str, str, str, str]


@dataclass(frozen=True, kw_only=True)
class OverflowPlace:
    """Skipped steps whose first non-finite gradient was the same tensor on the same rank.

    Attributes:
        tensor: its name.
        rank: None if gradients had been averaged before they were checked.
        steps: number of these steps, and in `first_step` and `last_step` when they were.
    """

    tensor: str
    rank: int | None
    steps: int
    first_step: int
    last_step: int


@dataclass(kw_only=True)
class RunTotals:
    """Totals of a run, including resumed parts.

    Attributes:
        steps: steps trained, skipped ones included.
        skipped_steps: steps whose update was left out.
        tokens: tokens trained on, over all ranks.
        seconds: time in steps.
        final_loss: loss of the last step; `None` before the first.
        best_loss: lowest finite loss of a step that was not skipped, and in `best_step` which.
        overflows: where gradients were not finite in skipped steps.
    """

    steps: int = 0
    skipped_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    final_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    overflows: list[OverflowPlace] = field(default_factory=list)

    def add_step(
        self,
        *,
        loss: float,
        tokens: int,
        seconds: float,
        is_skipped: bool,
        overflow: tuple[str, int | None] | None = None,
    ) -> None:
        """Add one step.

        Args:
            loss: of the step.
            tokens: over all ranks.
            seconds: how long it took.
            is_skipped: whether its update was left out.
            overflow: the first tensor whose gradient was not finite, and its rank if that is known; None: it
                is not known, or all were finite.
        """
        self.steps += 1
        self.skipped_steps += is_skipped
        self.tokens += tokens
        self.seconds += seconds
        self.final_loss = loss
        if is_skipped and overflow is not None:
            self._add_overflow(*overflow)
        if not is_skipped and math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step = loss, self.steps

    def _add_overflow(self, tensor: str, rank: int | None) -> None:
        for number, place in enumerate(self.overflows):
            if (place.tensor, place.rank) == (tensor, rank):
                self.overflows[number] = replace(place, steps=place.steps + 1, last_step=self.steps)
                return
        self.overflows.append(
            OverflowPlace(tensor=tensor, rank=rank, steps=1, first_step=self.steps, last_step=self.steps)
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for the checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; earlier versions have not saved where overflows were."""
        places = [OverflowPlace(**place) for place in state.get("overflows", ())]
        for each in fields(self):
            setattr(self, each.name, places if each.name == "overflows" else state[each.name])


@dataclass(frozen=True, kw_only=True)
class WorstLayer:
    """The worst layer in one measure, and the value over all layers."""

    role: str
    measure: str
    layer: str
    value: float
    all_layers: float | None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The result of a run.

    Attributes:
        totals: steps, tokens, time, losses.
        tokens_per_second: speed without the first step of the process, if it was measured.
        timed_steps: the number of steps that this speed is over; a resumed run times only its last part.
        overflow: counts of output gradients over all counted steps; `None` if nothing was tracked.
        counted_steps: number of these steps.
        worst: the worst layer per role and measure, output gradients first.
        entries: additional entries of `summary.json` from components.
        rows: additional rows on the console from components: two names, each followed by its value.
    """

    totals: RunTotals
    tokens_per_second: float | None = None
    timed_steps: int = 0
    overflow: OperandCounts | None = None
    counted_steps: int = 0
    worst: tuple[WorstLayer, ...] = ()
    entries: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Row] = ()

    def facts(self) -> dict[str, Fact]:
        """Flat facts, for `summary.json` and W&B."""
        totals = asdict(self.totals)
        totals.pop("overflows")  # no flat fact
        facts: dict[str, Fact] = {**totals, "tokens_per_second": self.tokens_per_second}
        if self.overflow is not None:
            facts |= {
                "gradient_overflow/total_overflow_elements": self.overflow.saturated,
                "gradient_overflow/total_elements": self.overflow.elements,
                "gradient_overflow/element_overflow_rate": self.overflow.saturation_rate,
                "gradient_overflow/total_overflow_batches": self.overflow.quantizations_with_overflow,
                "gradient_overflow/total_batches": self.overflow.quantizations,
                "gradient_overflow/batch_overflow_rate": self.overflow.batch_rate,
                "gradient_overflow/underflow_rate": self.overflow.underflow_rate,
                "gradient_overflow/nonfinite_elements": self.overflow.nonfinite,
                "gradient_overflow/counted_steps": self.counted_steps,
            }
        return facts

    def write(self, path: Path) -> None:
        """Write `summary.json` atomically."""
        worst_layers = [json_ready(asdict(row)) for row in self.worst]
        places = sorted(self.totals.overflows, key=lambda place: (-place.steps, place.first_step))
        record = {
            **json_ready(self.facts()),
            "worst_layers": worst_layers,
            "overflows": [asdict(place) for place in places],
            **self.entries,
        }
        with atomic_file(path) as file:
            json.dump(record, file, indent=2, allow_nan=False)
            file.write("\n")

    def render(self) -> str:
        """The summary as ASCII text of at most 24 lines of 80 characters."""
        blocks = [self._render_run()]
        if self.overflow is not None:
            is_sample = self.counted_steps < self.totals.steps
            plural = "s" if self.counted_steps > 1 else ""
            over = f"{self.counted_steps:,} counted step{plural}" if is_sample else "the run"
            blocks.append(_render_overflow(self.overflow, over))
        if self.worst:
            blocks.append(_render_worst(self.worst))
        return "\n".join([" Summary ".center(WIDTH, "="), *"\n\n".join(blocks).splitlines(), "=" * WIDTH])

    def _render_run(self) -> str:
        totals = self.totals
        best = f" (step {totals.best_step})" if totals.best_step is not None else ""
        best_loss = columns.loss_text(totals.best_loss) + best
        steps = f"{totals.steps:,} ({totals.skipped_steps:,} skipped)"
        speed = columns.amount_text(self.tokens_per_second)
        if 0 < self.timed_steps < totals.steps - 1:
            speed += f" (last {counted(self.timed_steps, 'step')})"
        rows = [
            ("steps", steps, "time in steps", columns.clock_text(totals.seconds)),
            ("final loss", columns.loss_text(totals.final_loss), "best loss", best_loss),
            ("tokens", f"{totals.tokens:,}", "tokens/s", speed),
            *self.rows,
        ]
        return "\n".join(f"{a:<12}{b:<28}{c:<15}{d}".rstrip() for a, b, c, d in rows)


def worst_layers(layers: Sequence[LayerOverflow]) -> tuple[WorstLayer, ...]:
    """For each role, output gradients first: most saturation, most underflow, and lowest SNR."""
    measures: tuple[tuple[str, Callable[[OperandCounts], float | None], int], ...] = (
        ("saturation", lambda counts: counts.saturation_rate, 1),
        ("underflow", lambda counts: counts.underflow_rate, 1),
        ("snr_db", lambda counts: counts.snr_db, -1),
    )
    worst = []
    for role in reversed(ROLES):
        rows = [row for row in layers if row.role == role]
        together = sum((row.counts for row in rows), OperandCounts())
        for name, measure, sign in measures:
            known = [(value, row.layer) for row in rows if (value := measure(row.counts)) is not None]
            value, layer = max(known, key=lambda pair: sign * pair[0], default=(0.0, ""))
            if not layer or (sign > 0 and value == 0):  # where nothing saturates, no layer is the worst
                continue
            worst.append(
                WorstLayer(role=role, measure=name, layer=layer, value=value, all_layers=measure(together))
            )
    return tuple(worst)


def _render_overflow(overflow: OperandCounts, over: str) -> str:
    def row(name: str, part: int, whole: int, what: str, rate: float | None) -> str:
        return f"{name:<12}{columns.percent_text(rate):>7}  {part:,} of {whole:,} {what}"

    lines = [
        f"quantised output gradients, over {over}",
        row("  saturated", overflow.saturated, overflow.elements, "elements", overflow.saturation_rate),
        row(
            "  batches",
            overflow.quantizations_with_overflow,
            overflow.quantizations,
            "quantisations",
            overflow.batch_rate,
        ),
        row("  underflow", overflow.underflow, overflow.elements, "elements", overflow.underflow_rate),
    ]
    if overflow.nonfinite:
        lines.append(f"{'  inf or NaN':<12}{'':>7}  {overflow.nonfinite:,} elements, in none of these rates")
    return "\n".join(lines)


def _render_worst(worst: Sequence[WorstLayer]) -> str:
    lines = ["worst layer".ljust(25 + _LAYER_WIDTH) + "there".rjust(8) + "all layers".rjust(11)]
    role = ""
    for row in worst:
        is_snr = row.measure == "snr_db"
        name = LABELS.get(row.measure, row.measure)
        there, everywhere = (
            columns.UNKNOWN if value is None else f"{value:.1f} dB" if is_snr else columns.percent_text(value)
            for value in (row.value, row.all_layers)
        )
        heading = "" if row.role == role else row.role
        layer = _shortened(row.layer).ljust(_LAYER_WIDTH)
        lines.append(f"  {heading:<12}{name:<11}{layer}{there:>8}{everywhere:>11}")
        role = row.role
    return "\n".join(lines)


def _shortened(layer: str) -> str:
    """`layer`, shortened at the beginning if it is too long; its end has the number and the kind."""
    room = _LAYER_WIDTH - 1
    return layer if len(layer) <= room else ".." + layer[2 - room :]
