"""The course of the loss: a rise, a jump in one step, no learning at all; and what explains them.

The loss of a step is computed with weights that the step before has changed. If that step was like all
others (same learning rate, usual gradient norm), the weights cannot have changed much, and a jump comes from
the batch, or from hardware. A rise over several steps comes from the updates. An update of Adam changes each
weight by about the learning rate. The rate is therefore named where it is as large as the weights were at the
start (`LARGE_UPDATE`), and otherwise, as likely, where loss and gradients rose together in the upper half of
its course and no other cause was found before. At a rate far above that (`REPLACING`) a loss that never rises
has not learnt what a lower rate would teach, and one that is NaN after the first updates did not rise before.

All comparisons are of the logarithm of the loss, with running medians and robust deviations. Not covered:
runs of fewer than `LEAST_STEPS` steps without such updates, and a loss that is too high from the first step
to the last at a usual rate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalowbit.findings import base
from megalowbit.findings.base import Evidence, Finding
from megalowbit.findings.robust import Array, noise, running_median
from megalowbit.findings.run_files import RunFiles
from megalowbit.records.files import METRICS

LEAST_STEPS = 12
WINDOW_SHARE, SHORTEST, LONGEST = 0.05, 5, 100  # of the running median, in steps
BRIEF = 3  # steps of a median that one easy batch does not move
DEVIATIONS = 6.0
LEAST_RISE = 0.08  # of log loss: 8 %
LEAST_NOISE = 0.005  # of log loss
ABSENT = 10  # steps without a sample, after which a source begins anew
SUDDEN = 0.6  # share of a change that one step must have
UPPER = 0.5  # of the highest learning rate
LARGE_UPDATE = 0.5  # learning rate / deviation of the initial weights: two updates replace a weight
REPLACING = 2.0  # the same: each update replaces the weights
BURSTING = 10.0  # the same: an update makes the weights ten times as large
LARGER_NORM = 3.0  # times the gradient norm at the lowest loss
SMALL_PATH = 0.05  # sum of all rates / deviation: the weights are still those of the start
LEAST_STEPS_TO_LEARN = 20
LEAST_FALL = 0.01  # of log loss


class Change(NamedTuple):
    """A lasting change of the loss.

    Attributes:
        best: row of the level before it.
        row: row at which it is known.
        size: in log loss, positive for a rise.
        is_sudden: most of it came in one step, which is `row`.
        limit: what would still have been usual.
    """

    best: int
    row: int
    size: float
    is_sudden: bool
    limit: float


def findings(run: RunFiles, known: list[Finding]) -> list[Finding]:
    """What the losses show; `known` are causes that other records have shown."""
    found = _of_course(run, known)
    return found if any(each.name == base.RATE for each in found) else [*found, *_burst(run, known)]


def _of_course(run: RunFiles, known: list[Finding]) -> list[Finding]:
    metrics = run.metrics
    rows = np.flatnonzero(np.isfinite(metrics["loss"]) & (metrics["loss"] > 0))
    if len(rows) < LEAST_STEPS:
        return []
    values = np.log(np.maximum(metrics["loss"][rows], 1e-9))
    limit = max(DEVIATIONS * max(noise(values), LEAST_NOISE), LEAST_RISE)
    source = _new_source(run, limit)
    change = _first_change(values, limit, _relative_rates(run)[rows] >= LARGE_UPDATE)
    if change is None:
        return [source] if source is not None else _replacing(run) or _no_learning(run, values)
    change = change._replace(best=int(rows[change.best]), row=int(rows[change.row]))
    if source is not None and (source.step or 0) <= metrics.steps[change.row]:
        return [source]
    return [_with_cause(run, change, known), *([] if source is None else [source])]


def _first_change(values: Array, limit: float, replaced: NDArray[np.bool_]) -> Change | None:
    """The first rise or sudden fall; one is enough, as what follows may be its consequence."""
    window = int(np.clip(WINDOW_SHARE * len(values), SHORTEST, LONGEST))
    changes = (_rise(values, window, limit, replaced), _fall(values, window, limit))
    return min((each for each in changes if each is not None), key=lambda change: change.row, default=None)


def _rise(values: Array, window: int, limit: float, replaced: NDArray[np.bool_]) -> Change | None:
    """A median that left the level before it; `replaced` marks steps whose updates replace the weights.

    Such updates undo within a few steps what they taught, so a long median does not show how far the loss had
    fallen: there, the level is that of `BRIEF` steps. Where the loss had settled before, a few low steps are
    easy batches.
    """
    level = running_median(values, window)
    is_unsettled = np.ones(len(values), dtype=bool)
    steady = running_median(values, SHORTEST)
    is_unsettled[SHORTEST + BRIEF :] = steady[: -SHORTEST - BRIEF] - steady[SHORTEST:-BRIEF] > limit
    brief = np.where(replaced & is_unsettled, running_median(values, BRIEF), np.inf)
    # a long median falls later than a brief one, so it is compared with those before its window
    before = np.concatenate([np.full(window, np.inf), brief])[: len(values)]
    beyond = np.flatnonzero(level - np.minimum.accumulate(np.minimum(level, before)) > limit)
    if not len(beyond):
        return None
    known = int(beyond[0])
    brief[max(0, known + 1 - window) :] = np.inf
    floor = np.minimum(level, brief)
    best = int(np.argmin(floor[: known + 1]))
    # the median follows by half a window: the first single step beyond is where it began
    after = np.flatnonzero(values[best + 1 : known + 1] - floor[best] > limit)
    row = best + 1 + int(after[0]) if len(after) else known
    size = float(level[known] - floor[best])
    step = float(values[row] - max(values[row - 1], floor[best]))
    return Change(best, row, size, is_sudden=step > SUDDEN * size, limit=limit)


def _fall(values: Array, window: int, limit: float) -> Change | None:
    """A fall in one step to far below the trend, that lasts: text that can be guessed."""
    for row in range(SHORTEST, len(values) - 2):
        before = float(np.min(values[max(0, row - window) : row]))
        after = float(np.max(values[row : row + 3]))
        # twice the limit, and more than a third of the loss in a step: learning is not that fast
        if before - after > max(2 * limit, np.log(1.5)):
            return Change(row - 1, row, after - before, is_sudden=True, limit=limit)
    return None


def _with_cause(run: RunFiles, change: Change, known: list[Finding]) -> Finding:
    """The change, with its cause if that can be told."""
    metrics = run.metrics
    step = int(metrics.steps[change.row])
    symptom, rate = _symptom(run, change), _rate(run, change)
    if rate is not None and rate.is_shown:
        return rate
    if any(each.role == "cause" and (each.step or 0) <= step and each.may_cause(symptom) for each in known):
        return symptom
    return rate or _batch(run, change) or symptom


def _losses_and_norms(run: RunFiles, change: Change) -> list[Evidence]:
    """Loss and gradient norm at the change."""
    metrics = run.metrics
    losses, norms = metrics["loss"], metrics["grad_norm"]
    best, row = change.best, change.row
    what = "the last usual" if change.is_sudden else "the lowest level"
    evidence = [
        Evidence(
            file=METRICS, step=int(metrics.steps[row - 1 if change.is_sudden else best]),
            text=f"loss {losses[row - 1 if change.is_sudden else best]:.4g}, {what}",
        ),
        Evidence(
            file=METRICS, step=int(metrics.steps[row]),
            text=f"loss {losses[row]:.4g}; {change.limit:.1%} of change would have been usual",
        ),
    ]  # fmt: skip
    before = norms[max(0, row - 20) : row]
    if np.isfinite(before).any() and np.isfinite(norms[row]):
        evidence.append(
            Evidence(
                file=METRICS, step=int(metrics.steps[row]),
                text=f"grad_norm {norms[row]:.4g}; median of the steps before {np.nanmedian(before):.4g}",
            )
        )  # fmt: skip
    return evidence


def _symptom(run: RunFiles, change: Change) -> Finding:
    step = int(run.metrics.steps[change.row])
    verb = "rose" if change.size > 0 else "fell"
    return Finding(
        name=base.JUMPED if change.is_sudden else base.ROSE, step=step, role="symptom", is_shown=True,
        title=f"the loss {verb} by {abs(np.expm1(change.size)):.0%} "
        f"{'in step' if change.is_sudden else 'by step'} {step}",
        evidence=tuple(_losses_and_norms(run, change)),
        remedy=(
            "record more from a checkpoint before it: --set megalowbit.telemetry.count_every=1 --set "
            "megalowbit.telemetry.layers_every=10 shows which layer changes first",
            "repeat the steps with other batches: --set megalowbit.loss_guard.spike=rollback; if the loss "
            "then stays low, it was the data",
        ),
    )  # fmt: skip


def _new_source(run: RunFiles, limit: float) -> Finding | None:
    """A source of a blend that began to give samples, with a loss unlike that of the others before."""
    names = [name for name in run.metrics.columns if name.startswith("loss/")]
    sources = {name.removeprefix("loss/"): run.metrics[name] for name in names}
    found = []
    for name, losses in sources.items():
        given = np.isfinite(losses)
        for row in np.flatnonzero(given[ABSENT:] & ~_any_before(given, ABSENT)) + ABSENT:
            own = float(np.nanmedian(losses[row : row + SHORTEST]))
            others = [each[row - ABSENT : row] for other, each in sources.items() if other != name]
            before = np.concatenate([np.zeros(0), *(each[np.isfinite(each)] for each in others)])
            if len(before) and abs(np.log(max(own, 1e-9) / max(float(np.median(before)), 1e-9))) > limit:
                found.append((int(row), name, own, float(np.median(before))))
    return _of_source(run, *min(found), limit) if found else None


def _any_before(given: NDArray[np.bool_], rows: int) -> NDArray[np.bool_]:
    """(n - rows,): whether any of the `rows` values before each is true, from the row `rows` on."""
    total = np.concatenate([[0], np.cumsum(given)])
    return (total[rows:-1] - total[: -rows - 1]) > 0


def _of_source(run: RunFiles, row: int, name: str, own: float, rest: float, limit: float) -> Finding:
    metrics = run.metrics
    step = int(metrics.steps[row])
    verb, maybe = "rose", "noise, another encoding or language, or harder on purpose"
    if own < rest:
        verb, maybe = "fell", "one text again and again, or easier on purpose"
    return Finding(
        name=base.DATA, step=step,
        title=f"the data changed in step {step}: source {name} began to give samples, and the loss {verb} "
        f"from {rest:.4g} to {own:.4g} ({maybe})",
        evidence=(
            Evidence(
                file=METRICS, step=int(metrics.steps[row - 1]),
                text=f"loss {metrics['loss'][row - 1]:.4g}, and no sample of {name} in {ABSENT} steps",
            ),
            Evidence(
                file=METRICS, step=step,
                text=f"loss/{name} {own:.4g} (median of {SHORTEST} steps); the other sources had {rest:.4g}; "
                f"{limit:.1%} of difference would be usual",
            ),
        ),
        remedy=(
            f"look at its text: megalowbit.data.sources.{name}",
            f"leave it out: --set megalowbit.data.sources.{name}.weight=0, or 0 in megalowbit.data.phases; "
            f"then continue from a checkpoint before step {step}",
        ),
    )  # fmt: skip


def _batch(run: RunFiles, change: Change) -> Finding | None:
    """A jump that no update explains, and that ended in one step as well: the batches were others."""
    metrics, row = run.metrics, change.row
    rates, norms = metrics["lr"], metrics["grad_norm"]
    usual = norms[max(0, row - 20) : row - 1]
    before = norms[row - 1]
    if not len(usual) or not np.isfinite(before) or before > 3 * np.nanmedian(usual):
        return None  # an unusual update came first
    if not np.isfinite(rates[row - 1]) or rates[row - 1] > 1.5 * np.nanmin(rates[max(0, row - 5) : row]):
        return None
    values = np.log(np.maximum(metrics["loss"], 1e-9))
    if not change.is_sudden:
        return None
    back = np.flatnonzero(np.abs(values[row + 2 :] - values[row - 1]) < change.limit)
    if not len(back):
        return None
    end = row + 2 + int(back[0])
    if abs(values[end] - values[end - 1]) < SUDDEN * abs(change.size):
        return None  # it came back slowly: weights were relearned
    step, last = int(metrics.steps[row]), int(metrics.steps[end])
    return Finding(
        name=base.DATA, step=step, is_shown=False,
        title=f"the batches of steps {step} to {last - 1} are unlike the others: the loss left its level in "
        "one step and came back in one step, so the weights are not the reason",
        evidence=(
            *_losses_and_norms(run, change),
            Evidence(
                file=METRICS, step=step - 1, text=f"grad_norm {before:.4g} of the update before: as usual"
            ),
            Evidence(file=METRICS, step=last, text=f"loss {metrics['loss'][end]:.4g}: back in one step"),
        ),
        remedy=(
            "look at that part of the corpus; with megalowbit.data.sources, loss/<source> shows which it is",
            "leave such batches out: --set megalowbit.loss_guard.spike=rollback",
        ),
    )  # fmt: skip


def _relative_rates(run: RunFiles) -> Array:
    """(t,): the share of its initial deviation that an update of Adam changes a weight by; 0 under SGD."""
    optimizer = run.config.get("optimizer")
    if isinstance(optimizer, dict) and optimizer.get("type") == "SGD":
        return np.zeros(len(run.metrics["lr"]))
    return run.metrics["lr"] / run.initial_deviation[0]


def _rate(run: RunFiles, change: Change) -> Finding | None:
    """The learning rate, if the loss rose in the upper half of its course and its updates are large."""
    metrics = run.metrics
    rates, relative = metrics["lr"], _relative_rates(run)
    since_best = slice(change.best, change.row + 1)
    if change.size < 0 or not np.isfinite(rates[since_best]).any():
        return None
    peak, now = float(np.nanmax(rates)), float(np.nanmax(rates[since_best]))
    ratio = float(np.nanmax(relative[since_best]))
    if ratio < LARGE_UPDATE and (now < UPPER * peak or change.is_sudden or not _norm_grew(run, change)):
        return None
    step, best = int(metrics.steps[change.row]), int(metrics.steps[change.best])
    since = int(metrics.steps[np.argmax(relative >= LARGE_UPDATE)]) if ratio >= LARGE_UPDATE else best
    warmup = _warmup(rates)
    why = f": {_beside_the_weights(run)}: × {ratio:.2g}" if ratio > 0 else ""
    evidence = (
        *_losses_and_norms(run, change),
        Evidence(
            file=METRICS, step=best, text=f"lr {rates[change.best]:.3g} at the lowest level of the loss"
        ),
        Evidence(file=METRICS, step=step, text=f"lr {rates[change.row]:.3g}{why}"),
    )  # fmt: skip
    first = min(since, step)
    before = f" or from a checkpoint before step {first}" if first > 1 else ""
    remedy = [f"--set optimizer.params.lr={_lower_rate(run, peak):g}, in a new run{before}"]
    no_warmup = "" if warmup else ", and there is no warm-up"
    if not warmup:
        steps = max(10, (run.planned_steps or 1000) // 50)
        schedule = f'\'megalowbit.lr_schedule={{"type": "cosine", "warmup_steps": {steps}}}\''
        if run.config.get("scheduler"):
            schedule = f"scheduler.params.warmup_num_steps={steps}"
        remedy.append(f"warm up: --set {schedule}")
    return Finding(
        name=base.RATE, step=first, is_shown=ratio >= 1,
        title=f"the learning rate is too high from step {first} on{no_warmup}: the loss rose "
        f"from step {best} to {step}, at lr {now:.3g}",
        evidence=evidence, remedy=tuple(remedy),
    )  # fmt: skip


def _beside_the_weights(run: RunFiles) -> str:
    spread, source = run.initial_deviation
    return (
        "an update of Adam changes a weight by about that, and the weights began with a deviation of "
        f"{spread:g} ({source})"
    )


def _lower_rate(run: RunFiles, peak: float) -> float:
    """A tenth of the peak; with Adam at most a tenth of what the weights began with."""
    most = min(peak, run.initial_deviation[0]) if np.nanmax(_relative_rates(run)) > 0 else peak
    return float(f"{0.1 * most:.1g}")


def _replacing(run: RunFiles) -> list[Finding]:
    """A rate at which each update of Adam replaces the weights, though the loss never rose."""
    relative = _relative_rates(run)
    above = np.flatnonzero(relative >= REPLACING)
    if not len(above) or _starts_trained(run):
        return []
    rates, first = run.metrics["lr"], above[0]
    peak, step = float(np.nanmax(rates)), int(run.metrics.steps[first])
    return [
        Finding(
            name=base.RATE, step=step, is_shown=False,
            title=f"the learning rate is too high: the loss did not rise at up to {peak:.3g}, but each update"
            " replaces the weights",
            evidence=(
                Evidence(
                    file=METRICS, step=step, text=f"lr {rates[first]:.3g}: {_beside_the_weights(run)}"
                ),
            ),
            remedy=(f"--set optimizer.params.lr={_lower_rate(run, peak):g}, in a new run",),
        )
    ]  # fmt: skip


def _burst(run: RunFiles, known: list[Finding]) -> list[Finding]:
    """A rate whose first updates replaced the weights, after which loss or gradients are not finite."""
    metrics, relative = run.metrics, _relative_rates(run)
    ends = [each.step for each in known if each.name in (base.LOSS, base.GRADIENTS) and each.step is not None]
    if not ends or _starts_trained(run):
        return []
    end = min(ends)
    applied = np.flatnonzero(~metrics.is_skipped & (relative >= REPLACING) & (metrics.steps < end))
    if not 0 < len(applied) <= LEAST_STEPS:
        return []  # none, or the loss has a course that shows more
    step, peak = int(metrics.steps[applied[0]]), float(np.nanmax(metrics["lr"][applied]))
    ratio = float(np.nanmax(relative[applied]))
    times = f"{len(applied)} update{'s' if len(applied) > 1 else ''}"
    return [
        Finding(
            name=base.RATE, step=step, is_shown=ratio >= BURSTING,
            title=f"the learning rate is too high: after {times} at lr {peak:.3g}, loss or gradients are not "
            f"finite from step {end} on",
            evidence=(
                Evidence(
                    file=METRICS, step=step,
                    text=f"lr {metrics['lr'][applied[0]]:.3g}, the first such update that was applied: "
                    f"{_beside_the_weights(run)}: × {ratio:.2g}",
                ),
            ),
            remedy=(f"--set optimizer.params.lr={_lower_rate(run, peak):g}, in a new run",),
        )
    ]  # fmt: skip


def _norm_grew(run: RunFiles, change: Change) -> bool:
    """Whether gradients grew together with the loss, as they do where updates overshoot."""
    norms = run.metrics["grad_norm"]
    window = slice(max(0, change.best - 10), change.best + 1)
    before, after = norms[window], norms[change.row : change.row + 10]
    if not (np.isfinite(before).any() and np.isfinite(after).any()):
        return False
    return bool(np.nanmedian(after) > LARGER_NORM * np.nanmedian(before))


def _warmup(rates: Array) -> int:
    """Steps before the learning rate reaches 90 % of its highest value."""
    return int(np.argmax(rates >= 0.9 * np.nanmax(rates)))


def _no_learning(run: RunFiles, values: Array) -> list[Finding]:
    """A loss that has not fallen."""
    metrics = run.metrics
    if len(values) < LEAST_STEPS_TO_LEARN or metrics.is_skipped.mean() > 0.5:
        return []
    part = max(5, len(values) // 10)
    fall = float(np.median(values[:part]) - np.median(values[-part:]))
    limit = max(2 * noise(values) / np.sqrt(part), LEAST_FALL)
    if fall > limit or metrics.steps[0] != 1 or _starts_trained(run):
        return []
    path, (spread, source) = float(np.nansum(metrics["lr"])), run.initial_deviation
    step = int(metrics.steps[-1])
    evidence = [
        Evidence(
            file=METRICS, step=step,
            text=f"median loss {np.exp(np.median(values[-part:])):.4g} in the last {part} steps, "
            f"{np.exp(np.median(values[:part])):.4g} in the first",
        )
    ]  # fmt: skip
    if path >= SMALL_PATH * spread:
        return [
            Finding(
                name=base.NO_LEARNING, step=step, role="symptom", evidence=tuple(evidence),
                title="the loss has not fallen, though the learning rate is large enough; why is not known",
                remedy=(
                    "evaluate on text that is known to be good: megalowbit evaluate",
                    "look at the corpus",
                ),
            )
        ]  # fmt: skip
    evidence.append(
        Evidence(
            file=METRICS, step=step,
            text=f"the sum of lr over all steps is {path:.2g}; weights began with a deviation of {spread:g} "
            f"({source}), so they are still about those of the start",
        )
    )  # fmt: skip
    return [
        Finding(
            name=base.NO_LEARNING, step=step, evidence=tuple(evidence),
            title=f"the run learns nothing: its learning rates (at most {np.nanmax(metrics['lr']):.2g}) are "
            "too small to change the weights in this number of steps",
            remedy=("raise it: --set optimizer.params.lr=…, a hundred times as high", "or train more steps"),
        )
    ]  # fmt: skip


def _starts_trained(run: RunFiles) -> bool:
    return run.setting("model", "checkpoint") is not None
