"""One rank that differs from the others: its device is slow, or computes other numbers.

Both are found by persistence. In healthy runs, the slowest rank and the rank with the highest loss change
from step to step, so the same rank many times in a row is no chance (`is_no_chance`). The size must also be
beyond what the run has shown before.
"""

from __future__ import annotations

import math

import numpy as np

from megalowbit.findings import base
from megalowbit.findings.base import Evidence, Finding
from megalowbit.findings.robust import Array, longest_streak
from megalowbit.findings.run_files import RunFiles
from megalowbit.records.files import METRICS

CHANCE = 1e-4  # that a healthy run has such a series somewhere
SLOWER = 1.5  # times the other ranks: half of the machine's time is then lost
LEAST_GAP = 3.0  # times the usual distance of losses
ALLOWED = 2  # steps in a series with another rank: pauses of the other device
LEAST_LENGTH = 10  # steps; a shorter time of slowness is over


def findings(run: RunFiles) -> list[Finding]:
    """A slow rank, and replicas that differ; empty for runs of one process."""
    if not len(run.metrics) or not np.isfinite(run.metrics["ranks/highest_loss_rank"]).any():
        return []
    return [*_slow_ranks(run), *_unequal_replicas(run)]


def is_no_chance(length: int, misses: int, share: float, rows: int) -> bool:
    """Whether a series of `length` steps, all but `misses` of one kind, is no accident in a run of `rows`.

    Args:
        length: of the series.
        misses: steps in it that are not of this kind.
        share: how often a step is of this kind otherwise.
        rows: places where the series could begin.
    """
    ways = math.comb(length, misses)
    return length >= LEAST_LENGTH and rows * ways * share ** (length - misses) <= CHANCE


def _series(run: RunFiles, column: str, *, is_beyond: np.ndarray) -> tuple[int, int, int] | None:
    """Rank, first row and length of a series in which a column names the same rank, too often for chance.

    How often it is named otherwise is taken from the steps before, and is at most 1 / ranks.
    """
    named, size = run.metrics[column], num_ranks(run)
    best = None
    for rank in sorted(set(named[np.isfinite(named)])):
        flags = (named == rank) & is_beyond
        first, length = longest_streak(flags, allowed=ALLOWED)
        before = flags[:first]
        share = min(1 / size, (int(before.sum()) + 1) / (len(before) + 2))
        misses = length - int(flags[first : first + length].sum())
        if is_no_chance(length, misses, share, len(named)) and (best is None or length > best[2]):
            best = (int(rank), first, length)
    return best


def num_ranks(run: RunFiles) -> int:
    """The number of processes of the last attempt; at least 2."""
    begun, _ = run.last_attempt
    size = (begun or {}).get("processes")
    if type(size) is int and size > 1:
        return size
    named = run.metrics["ranks/slowest"]
    return max(2, int(np.nanmax(named)) + 1) if np.isfinite(named).any() else 2


def _slow_ranks(run: RunFiles) -> list[Finding]:
    metrics = run.metrics
    ratio = metrics["ranks/slowest_milliseconds"] / metrics["ranks/other_milliseconds"]
    found = _series(run, "ranks/slowest", is_beyond=np.nan_to_num(ratio) > SLOWER)
    if found is None:
        return []
    rank, first, length = found
    rows = slice(first, first + length)
    step, last = int(metrics.steps[first]), int(metrics.steps[first + length - 1])
    own, others = (
        float(np.nanmedian(metrics[f"ranks/{name}_milliseconds"][rows])) for name in ("slowest", "other")
    )
    evidence = [
        Evidence(
            file=METRICS, step=step,
            text=f"ranks/slowest is {rank} in {int((metrics['ranks/slowest'][rows] == rank).sum())} of "
            f"{length} steps, to step {last}",
        ),
        Evidence(
            file=METRICS, step=step,
            text=f"its forward passes take {own:.3g} ms, those of the other ranks {others:.3g} ms (medians)",
        ),
        *_speed(metrics["tokens_per_second"], first, step),
    ]  # fmt: skip
    return [
        Finding(
            name=base.SLOW_RANK, step=step, evidence=tuple(evidence),
            title=f"rank {rank} is {own / others:.2g} times as slow as the others from step {step} on, and "
            "all wait for it: its device is throttled or shared, or its host is busy",
            remedy=(
                f"on the host of rank {rank}: nvidia-smi -q -d PERFORMANCE,TEMPERATURE, and top for other "
                "processes",
                "leave that host out (sbatch --exclude=HOST) and continue with --resume auto",
            ),
        )
    ]  # fmt: skip


def _speed(speed: Array, first: int, step: int) -> list[Evidence]:
    """How the speed of the run changed, if it was known before."""
    before, after = speed[1:first], speed[first:]  # the first step compiles
    if len(before) < 3:
        return []
    text = f"tokens_per_second {np.nanmedian(before):.3g} before, {np.nanmedian(after):.3g} since (medians)"
    return [Evidence(file=METRICS, step=step, text=text)]


def _unequal_replicas(run: RunFiles) -> list[Finding]:
    metrics = run.metrics
    with np.errstate(invalid="ignore"):  # inf - inf
        gap = metrics["ranks/highest_loss"] - metrics["ranks/other_loss"]
    gap = np.where(np.isfinite(gap), gap, np.nan)
    known = gap[np.isfinite(gap)]
    if len(known) < 8:
        return []
    found = _rank_with_large_gaps(run, gap)
    if found is None:
        return []
    rank, first, length, usual = found
    step = int(metrics.steps[first])
    rows = slice(first, first + length)
    named = metrics["ranks/highest_loss_rank"][rows]
    size = num_ranks(run)
    who = f"rank {rank}" if size > 2 else "the two ranks"
    changed = _which_rank_changed(run, first) if size == 2 else None
    evidence = [
        Evidence(
            file=METRICS, step=step,
            text=f"ranks/highest_loss_rank is {rank} in {int((named == rank).sum())} of {length} steps",
        ),
        Evidence(
            file=METRICS, step=step,
            text=f"its loss is {np.nanmedian(gap[rows]):.3g} above the median of the others; before, the "
            f"highest was {usual:.3g} above it (medians)",
        ),
    ]  # fmt: skip
    if changed is not None:
        evidence.append(changed)
    compute = "computes another model than" if size > 2 else "compute different models:"
    return [
        Finding(
            name=base.REPLICAS, step=step, evidence=tuple(evidence),
            title=f"from step {step} on, {who} {compute} "
            f"{'the others: its' if size > 2 else 'the'} weights differ, though all replicas "
            "should be equal (a bit flip in memory, or a device that computes wrongly)",
            remedy=(
                f"continue from a checkpoint before step {step}: move later ones out of checkpoints/, then "
                "--resume auto; a load gives all ranks the same weights",
                "test the devices (dcgmi diag -r 3), and leave out the host that fails",
            ),
        )
    ]  # fmt: skip


def _rank_with_large_gaps(run: RunFiles, gap: Array) -> tuple[int, int, int, float] | None:
    """Rank, first row and length of a series of large gaps, and the usual gap before it."""
    # the lower quartile of a run is healthy even if most of the run is not; of distances that are normal,
    # the median is 2.1 times as high
    usual = 2.1 * float(np.nanquantile(gap, 0.25))
    found = _series(run, "ranks/highest_loss_rank", is_beyond=np.nan_to_num(gap) > usual)
    if found is None:
        return None
    rank, first, length = found
    before, inside = float(np.nanmedian(gap[: max(first, 4)])), gap[first : first + length]
    middle = float(np.nanmedian(inside))
    if middle <= LEAST_GAP * before:
        return None
    # chance may have named the same rank just before
    skipped = int(np.argmax(inside > (before + middle) / 2))
    return rank, first + skipped, length - skipped, before


def _which_rank_changed(run: RunFiles, first: int) -> Evidence | None:
    """Which of two ranks left its own past at the beginning of the series."""
    metrics = run.metrics
    if first < 1:
        return None
    is_first = metrics["ranks/highest_loss_rank"] == 0
    high, other = metrics["ranks/highest_loss"], metrics["ranks/other_loss"]
    losses = (np.where(is_first, high, other), np.where(is_first, other, high))
    changes = [abs(float(each[first] - each[first - 1])) for each in losses]
    rank = int(np.argmax(changes))
    if changes[rank] < 2 * changes[1 - rank]:
        return None
    return Evidence(
        file=METRICS, step=int(metrics.steps[first]),
        text=f"loss of rank {rank} {losses[rank][first - 1]:.4g} → {losses[rank][first]:.4g}, of rank "
        f"{1 - rank} {losses[1 - rank][first - 1]:.4g} → {losses[1 - rank][first]:.4g}: rank {rank} changed",
    )  # fmt: skip
