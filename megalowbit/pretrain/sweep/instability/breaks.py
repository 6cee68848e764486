"""Whether and when a run has broken, judged by its losses alone.

Three kinds: the loss is not finite; its mean over a window is too far above the lowest such mean so far; or
the mean is too far above that of the baseline, which has the same weights, batches and stress, over two
windows without a common step: a single spike of one of the two is not a gap. The first steps of a run, before
a window is full, are only judged by the first kind. A run that learns less, together with its baseline, and
without a rise, is not found; the report gives its distance from the unstressed run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megalowbit.pretrain.sweep.instability.settings import InstabilitySettings

Losses = Sequence[float | None]  # by step; None if it was not finite
Kind = Literal["not finite", "rise", "gap"]


@dataclass(frozen=True)
class Break:
    """The first step at which a run was broken in one way.

    Attributes:
        kind: the way.
        step: counted from 1; of a mean, the last step of its window.
        distance: nats above the best mean, or above the baseline's; None if the loss was not finite.
    """

    kind: Kind
    step: int
    distance: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Judgement:
    """What became of a run.

    Attributes:
        breaks: the first of each kind, earliest first; empty: it has not broken.
        is_broken_at_end: whether it was still broken after its last step.
        end: mean loss of the last window; NaN if a loss in it was not finite, or the run was stopped.
        gap: `end` minus the baseline's; NaN without one that is intact.
    """

    breaks: tuple[Break, ...]
    is_broken_at_end: bool
    end: float
    gap: float


def judge(losses: Losses, baseline: Losses | None, *, steps: int, settings: InstabilitySettings) -> Judgement:
    """Judge a run.

    Args:
        losses: of the run; fewer than `steps` if it was stopped because it diverged.
        baseline: of the baseline; None: the run is the baseline, or has none.
        steps: optimizer steps of both.
        settings: the limits.
    """
    means = window_means(losses, settings.window)
    peer = None if baseline is None else _intact_means(baseline, steps=steps, settings=settings)
    found = [_nonfinite(losses), _rise(means, settings.rise)]
    if peer is not None:
        found.append(_gap(means, peer, settings))
    breaks = sorted((each for each in found if each is not None), key=lambda each: each.step)
    end = means[-1] if means and len(means) == steps else math.nan
    gap = end - peer[-1] if peer is not None and len(peer) == steps else math.nan
    best = min((mean for mean in means if not math.isnan(mean)), default=math.nan)
    is_apart = peer is not None and len(means) == len(peer) and _ends_apart(means, peer, settings)
    is_well = end - best <= settings.rise and not is_apart
    return Judgement(tuple(breaks), bool(breaks) and not is_well, end, gap)


def window_means(losses: Losses, window: int) -> list[float]:
    """For each step, the mean of the window that ends with it; NaN if it is not full or not finite."""
    means = []
    for end in range(1, len(losses) + 1):
        values = losses[max(0, end - window) : end]
        finite = [value for value in values if value is not None]
        is_whole = len(finite) == window
        means.append(math.fsum(finite) / window if is_whole else math.nan)
    return means


def _intact_means(losses: Losses, *, steps: int, settings: InstabilitySettings) -> list[float]:
    """The baseline's means before it broke: later ones say nothing about the run that is compared."""
    own = judge(losses, None, steps=steps, settings=settings)
    means = window_means(losses, settings.window)
    return means[: own.breaks[0].step - 1] if own.breaks else means


def _nonfinite(losses: Losses) -> Break | None:
    for step, loss in enumerate(losses, start=1):
        if loss is None or not math.isfinite(loss):
            return Break("not finite", step, None)
    return None


def _rise(means: Sequence[float], limit: float) -> Break | None:
    best = math.inf
    for step, mean in enumerate(means, start=1):
        if mean - best > limit:
            return Break("rise", step, mean - best)
        if mean < best:
            best = mean
    return None


def _gap(means: Sequence[float], peer: Sequence[float], settings: InstabilitySettings) -> Break | None:
    count = 0
    for step, (mean, other) in enumerate(zip(means, peer, strict=False), start=1):
        count = count + 1 if mean - other > settings.gap else 0
        if count > settings.window:  # the first and the last of these windows have no step in common
            return Break("gap", step, mean - other)
    return None


def _ends_apart(means: Sequence[float], peer: Sequence[float], settings: InstabilitySettings) -> bool:
    """Whether a gap lasts to the end, over two windows without a common step."""
    last = slice(-settings.window - 1, None)
    return all(mean - other > settings.gap for mean, other in zip(means[last], peer[last], strict=True))
