"""Alarms: a recorded metric is beyond what runs without stress have shown at that step.

Metrics are judged by their median in buckets of steps. Their limits come from unstressed runs of the same
model and recipe: at step s, the extreme of all medians at steps between s / 2 and 2 s, moved outwards by a
margin. Metrics change during training, at first quickly, so a limit for all steps would be loose. Beyond the
last step of these runs, the last limit holds. An alarm needs several medians in a row beyond their limits,
and has the step at which the last of them is known: nothing later is used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megalowbit.pretrain.sweep.instability.settings import InstabilitySettings

Row = Mapping[str, Any]  # a line of metrics.jsonl
Series = Mapping[int, float]  # last step of a bucket → median


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A column of metrics.jsonl.

    Attributes:
        column: its name.
        is_above: whether unusually large values are bad; otherwise small ones.
        relative, absolute: the least distance of a limit from the extreme of unstressed runs: a share of the
            extreme, and a number.
        null_is_infinite: whether null is a value that was not finite; otherwise nothing was measured.
        is_total: whether the column counts from the start of the run; the change in a bucket is judged.
    """

    column: str
    is_above: bool = True
    relative: float = 0.0
    absolute: float = 0.0
    null_is_infinite: bool = False
    is_total: bool = False


OPERANDS = ("input", "weight", "grad_output")
METRICS = (
    Metric(column="loss", relative=0.05, null_is_infinite=True),  # what any telemetry must be better than
    Metric(column="grad_norm", relative=0.25, null_is_infinite=True),
    Metric(column="loss_scale", is_above=False, relative=0.5),
    Metric(column="skipped_steps", is_total=True),
    *(
        metric
        for role in OPERANDS
        for metric in (
            Metric(column=f"quantization/{role}/snr_db", is_above=False, absolute=0.5),
            Metric(column=f"quantization/{role}/saturation_rate", relative=0.2, absolute=0.001),
            Metric(column=f"quantization/{role}/underflow_rate", relative=0.2, absolute=0.001),
            Metric(column=f"quantization/{role}/zero_block_rate", relative=0.2, absolute=0.001),
            Metric(column=f"quantization/{role}/scale_saturation_rate", relative=0.2, absolute=0.001),
        )
    ),
    Metric(column="oscillation/ratio", relative=0.2),
    Metric(column="oscillation/share", relative=0.2, absolute=0.001),
)


@dataclass(frozen=True)
class Limit:
    """Limits of one metric.

    Attributes:
        metric: the metric.
        steps: increasing.
        values: the limit at each of the steps.
    """

    metric: Metric
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, step: int) -> float:
        """The limit of the first listed step that is not earlier, or the last one."""
        pairs = zip(self.steps, self.values, strict=True)
        return next((value for each, value in pairs if each >= step), self.values[-1])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        side = "above" if self.metric.is_above else "below"
        return {"alarm": side, "steps": list(self.steps), "values": list(self.values)}


@dataclass(frozen=True)
class Alarm:
    """The first alarm of a metric in a run.

    Attributes:
        metric: name of the column.
        step: at which it was known.
        value: the median there, perhaps infinite.
        limit: the limit there.
    """

    metric: str
    step: int
    value: float
    limit: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no infinity: null."""
        return {**asdict(self), "value": self.value if math.isfinite(self.value) else None}


def series(rows: Sequence[Row], metric: Metric, bucket: int) -> Series:
    """The medians of a metric by bucket; buckets in which it was not recorded are left out.

    Args:
        rows: of steps 1, 2, ….
        metric: the column.
        bucket: steps; the last bucket may be shorter.
    """
    found: dict[int, float] = {}
    total = 0.0
    for start in range(0, len(rows), bucket):
        part = rows[start : start + bucket]
        values = [_value(row[metric.column], metric) for row in part if metric.column in row]
        known = [value for value in values if not math.isnan(value)]
        if not known:
            continue
        if metric.is_total:
            total, known = known[-1], [known[-1] - total]
        found[start + len(part)] = statistics.median(known)
    return found


def limit_of(metric: Metric, unstressed: Sequence[Series], margin: float) -> Limit | None:
    """The limits by unstressed runs; None if they have not recorded the metric.

    Args:
        metric: the metric.
        unstressed: its medians in each of the runs.
        margin: distance of a limit from the extreme, as a share of the range.
    """
    steps = sorted({step for run in unstressed for step in run})
    limits = {}
    for step in steps:
        near = [
            value
            for run in unstressed
            for each, value in run.items()
            if step <= 2 * each and each <= 2 * step and math.isfinite(value)
        ]
        if not near:
            continue
        extreme = max(near) if metric.is_above else min(near)
        distance = max(margin * (max(near) - min(near)), metric.relative * abs(extreme), metric.absolute)
        limits[step] = extreme + distance if metric.is_above else extreme - distance
    return Limit(metric, tuple(limits), tuple(limits.values())) if limits else None


def first_alarm(run: Series, limit: Limit, in_a_row: int) -> Alarm | None:
    """The first alarm of a metric in a run; None: it gave none."""
    count = 0
    for step, value in sorted(run.items()):
        bound = limit.at(step)
        is_beyond = value > bound if limit.metric.is_above else value < bound
        count = count + 1 if is_beyond else 0
        if count == in_a_row:
            return Alarm(limit.metric.column, step, value, bound)
    return None


def false_alarms(metric: Metric, unstressed: Sequence[Series], settings: InstabilitySettings) -> int | None:
    """How many unstressed runs give an alarm by limits of the others; None: there are less than two."""
    runs = [run for run in unstressed if run]
    if len(runs) < 2:
        return None
    count = 0
    for number, run in enumerate(runs):
        limit = limit_of(metric, [*runs[:number], *runs[number + 1 :]], settings.margin)
        count += limit is not None and first_alarm(run, limit, settings.in_a_row) is not None
    return count


def _value(recorded: Any, metric: Metric) -> float:
    if recorded is None:
        return math.inf if metric.null_is_infinite else math.nan
    return float(recorded)
