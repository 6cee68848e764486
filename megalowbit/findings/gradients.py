"""Gradients and losses that are not finite: in which tensor, on which rank, and whether the scale matters.

With a dynamic loss scale, single skipped steps are normal: the scale is tried, and halved if it is too large.
They are told apart by the scale itself. A gradient that is too large for fp16 at scale S is finite at S/2 or
a little below. If steps had been applied at a scale, and steps at a small part of it are still skipped, the
gradients are not finite at any scale: they are NaN, or infinite before they are scaled.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from megalowbit.findings import base
from megalowbit.findings.base import Evidence, Finding
from megalowbit.findings.run_files import RunFiles
from megalowbit.records.files import LAYERS, METRICS

# A step's gradients differ by less than this factor from those of steps nearby: over 97 healthy runs of tiny
# models, a scale that had worked was never too large by more than 2^3 (docs/diagnose.md).
HOPELESS_FALL = 2.0**6
RANK_CHANCE = 1e-3  # a rank is at fault if chance names it that often or less


class Series(NamedTuple):
    """Skipped steps in a row: first and last row, and the largest scale of an applied step before."""

    first: int
    last: int
    worked: float


def findings(run: RunFiles) -> list[Finding]:
    """The first series of skipped steps that no loss scale explains; and losses that are not finite."""
    series = first_unscalable(run)
    if series is None:
        return _applied_nonfinite_loss(run)
    return [_of_series(run, series)]


def first_unscalable(run: RunFiles) -> Series | None:
    """The first series of skips at scales far below those that had worked, or without a loss scale."""
    metrics = run.metrics
    scales, skipped = metrics["loss_scale"], metrics.is_skipped
    worked, first = 0.0, None
    for row in range(len(metrics)):
        if not skipped[row]:
            worked, first = max(worked * 0.999, scales[row] if math.isfinite(scales[row]) else 0.0), None
            continue
        first = row if first is None else first
        scale = scales[row]
        is_unscaled = scale == 1 and (worked in (0.0, 1.0)) and _is_never_scaled(scales)
        is_hopeless = (worked and scale * HOPELESS_FALL <= worked) or (not worked and scale <= 1)
        if is_unscaled or is_hopeless or not math.isfinite(metrics["loss"][row]):
            last = row
            while last + 1 < len(metrics) and skipped[last + 1]:
                last += 1
            return Series(first, last, worked)
    return None


def _is_never_scaled(scales: np.ndarray) -> bool:
    known = scales[np.isfinite(scales)]
    return not len(known) or bool((known == 1).all())


def _of_series(run: RunFiles, series: Series) -> Finding:
    metrics = run.metrics
    rows = range(series.first, series.last + 1)
    step, end = int(metrics.steps[series.first]), int(metrics.steps[series.last])
    loss = metrics["loss"][series.first : series.last + 1]
    is_loss = not np.isfinite(loss).any()
    names = metrics.texts.get("skipped/tensor", {})
    tensors = Counter(names[at] for at in map(int, metrics.steps[rows]) if at in names)
    rank = _rank_at_fault(run, rows)
    evidence = [_skips(run, series)]
    scale_first, scale_last = metrics["loss_scale"][series.first], metrics["loss_scale"][series.last]
    if scale_last < scale_first:
        evidence.append(
            Evidence(
                file=METRICS, step=end,
                text=f"loss scale {scale_first:g} → {scale_last:g}, and the gradients are still not finite; "
                f"scale {series.worked:g} had worked before: the scale is not the cause",
            )
        )  # fmt: skip
    where = ""
    if tensors:
        name, count = tensors.most_common(1)[0]
        where = f" in {name}"
        inside = metrics["skipped/tensors"][series.first]
        of_all = f"; {inside:.0f} gradients were not finite in step {step}" if math.isfinite(inside) else ""
        evidence.append(
            Evidence(
                file=METRICS, step=step,
                text=f"skipped/tensor, the first in the order of backward: {name} in {count} of "
                f"{len(rows)} skipped steps{of_all}",
            )
        )  # fmt: skip
    layer = _first_nonfinite_input(run, step)
    if layer is not None:
        evidence.append(layer)
    if rank is not None:
        where += f" on rank {rank} only"
        evidence.append(
            Evidence(file=METRICS, step=step, text=f"skipped/rank: {rank} in all {len(rows)} skipped steps")
        )
    return _finding(run, step, is_loss=is_loss, where=where, rank=rank, evidence=evidence)


def _finding(
    run: RunFiles, step: int, *, is_loss: bool, where: str, rank: int | None, evidence: list[Evidence]
) -> Finding:
    """The finding with the remedies that fit."""
    back = "--set megalowbit.loss_guard.nonfinite=rollback leaves such batches out; then --resume auto"
    remedy = ["--set megalowbit.run.max_consecutive_skips=10 ends such a run earlier"]
    if run.has_checkpoint_before(step):
        remedy.insert(0, back)
    if rank is not None:
        remedy = [f"leave out the device of rank {rank}, or test it (dcgmi diag -r 3)", *remedy]
    if run.setting("precision") == "fp16":
        remedy.append("if it happens again with other batches: --set megalowbit.precision=bf16")
    if is_loss:
        return Finding(
            name=base.LOSS, step=step, evidence=tuple(evidence), remedy=tuple(remedy),
            title=f"the loss is not finite from step {step} on: the forward pass has NaN or inf",
        )  # fmt: skip
    return Finding(
        name=base.GRADIENTS, step=step, evidence=tuple(evidence), remedy=tuple(remedy),
        title=f"from step {step} on, gradients are NaN or inf{where}, though the loss is finite",
    )  # fmt: skip


def _skips(run: RunFiles, series: Series) -> Evidence:
    metrics = run.metrics
    count = series.last - series.first + 1
    loss = metrics["loss"][series.first]
    return Evidence(
        file=METRICS, step=int(metrics.steps[series.first]),
        text=f"{count} skipped step{'s' if count > 1 else ''} in a row, to step "
        f"{int(metrics.steps[series.last])}; loss {loss:.4g} in the first",
    )  # fmt: skip


def _rank_at_fault(run: RunFiles, rows: range) -> int | None:
    """The rank that alone had non-finite gradients in all these steps; None: several, or it is unknown."""
    metrics = run.metrics
    ranks, numbers = metrics["skipped/rank"][rows.start : rows.stop], metrics["skipped/ranks"]
    numbers = numbers[rows.start : rows.stop]
    begun, _ = run.last_attempt
    size = begun.get("processes") if begun is not None else None
    if size == 1:
        return None
    if not np.isfinite(ranks).all() or len(set(ranks)) != 1 or not (numbers == 1).all():
        return None
    chance = (1 / size) ** (len(ranks) - 1) if size else 1.0
    return int(ranks[0]) if chance <= RANK_CHANCE else None


def _first_nonfinite_input(run: RunFiles, step: int) -> Evidence | None:
    """The first layer in the order of the model whose input was not finite in a table from `step` on."""
    tables = run.layers
    if tables is None:
        return None
    table = int(np.searchsorted(tables.steps, step))
    if table >= len(tables.steps):
        return None
    for number in tables.rows_of("input"):
        if tables.counts["nonfinite_quantizations"][table, number] > 0:
            layer = tables.keys[number][0]
            return Evidence(
                file=LAYERS, step=int(tables.steps[table]),
                text=f"the first low-bit layer with NaN or inf in its input is {layer}: they arise before it",
            )  # fmt: skip
    return None


def _applied_nonfinite_loss(run: RunFiles) -> list[Finding]:
    """A loss that is not finite although the step was applied."""
    metrics = run.metrics
    bad = np.flatnonzero(~np.isfinite(metrics["loss"]) & ~metrics.is_skipped)
    if not len(bad):
        return []
    row = int(bad[0])
    step = int(metrics.steps[row])
    return [
        Finding(
            name=base.LOSS, step=step, role="symptom",
            title=f"the loss of step {step} is not finite, but its gradients were: the step was applied",
            evidence=(Evidence(file=METRICS, step=step, text=f"loss {metrics['loss'][row]}, not skipped"),),
            remedy=("--set megalowbit.loss_guard.nonfinite=rollback leaves such batches out",)
            if run.has_checkpoint_before(step)
            else (),
        )
    ]  # fmt: skip
