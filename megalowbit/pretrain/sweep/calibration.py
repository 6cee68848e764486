"""Finds a threshold for precision speculation: compares short runs at several thresholds with bf16.

The configuration is trained at every threshold, and in bf16 as the reference, once for each seed
(`sweep.runs`). The cost of a threshold is its gap: the difference of the mean loss over the last steps, in %
of the reference's, paired by seed. Its gain is the share of products × steps at 8 bits or fewer. The tool
suggests the lowest threshold with an allowed gap, because lower thresholds run more products at fewer bits.

A short run shows what the start of training tolerates; gaps may open later. A gap whose interval contains
zero is not significant. Not supported: a different threshold for each precision, long runs.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalowbit.data.loader import count_samples
from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError, shown
from megalowbit.json_text import is_finite_number
from megalowbit.pretrain.checks import load_checked_config
from megalowbit.pretrain.sweep.runs import LEAN, Gap, Run, execute, folder_name, make_folder
from megalowbit.records.files import SUMMARY
from megalowbit.speculation.reports.picture import draw_calibration, require_matplotlib
from megalowbit.speculation.settings import SpeculationSettings
from megalowbit.values import counted

REFERENCE = "bf16"
LAST_PART = 5  # by default, the loss is averaged over the last fifth of the steps
KEY = "megalowbit.speculation"


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """The runs of a calibration and how they are compared.

    Attributes:
        config: DeepSpeed configuration with a `megalowbit.speculation` section.
        thresholds: SNR in dB; sorted, without duplicates.
        seeds: seeds of weights and data; an interval needs two or more.
        steps: steps of each run; `None`: as configured.
        last: number of steps at the end whose mean loss is compared; `None`: a fifth of the steps.
        out: folder of the runs and results.
        jobs: number of simultaneous runs, with one thread each.
        max_gap: by how many % the loss may exceed that of bf16.
        program: path of launch/pretrain.py.
    """

    config: Path
    thresholds: tuple[float, ...]
    seeds: tuple[int, ...]
    steps: int | None
    last: int | None
    out: Path
    jobs: int
    max_gap: float
    program: Path

    def __post_init__(self) -> None:
        numbers = {"--steps": self.steps, "--last": self.last, "--jobs": self.jobs}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise UserError(f"{name} {value} must be at least 1: choose another number")
        if not (math.isfinite(self.max_gap) and self.max_gap > 0):
            raise UserError(f"--max-gap {self.max_gap} is not a gap in %: give a number above 0, such as 0.3")
        object.__setattr__(self, "thresholds", _checked_thresholds(self.thresholds))
        object.__setattr__(self, "seeds", tuple(dict.fromkeys(self.seeds)))

    def runs(self) -> list[Run]:
        """All runs, seed by seed, the reference first."""
        overrides_of = {REFERENCE: [f"megalowbit.recipe={REFERENCE}", f"{KEY}=null"]}
        overrides_of |= {label(value): [f"{KEY}.threshold_db={value}"] for value in self.thresholds}
        steps = [] if self.steps is None else [f"megalowbit.run.steps={self.steps}"]
        return [
            Run(
                label=name,
                seed=seed,
                folder=self.out / folder_name(name, seed),
                config=self.config,
                overrides=(*LEAN, *steps, f"megalowbit.run.seed={seed}", *overrides),
                program=self.program,
            )
            for seed in self.seeds
            for name, overrides in overrides_of.items()
        ]


@dataclass(frozen=True, kw_only=True)
class ThresholdOutcome:
    """The results at one threshold.

    Attributes:
        threshold_db: the threshold.
        losses: seed → loss; NaN if the run diverged.
        gap: gap to the reference, in % of its loss; NaN if a run diverged.
        shares: precision → share of products × steps, mean over the seeds; empty if a run diverged.
        share_8bit: share of products × steps at 8 bits or fewer, mean over the seeds; NaN if a run diverged.
        hits: verified products that reached the threshold, over all seeds.
        misses: verified products that did not, over all seeds.
    """

    threshold_db: float
    losses: Mapping[int, float]
    gap: Gap
    shares: Mapping[str, float]
    share_8bit: float
    hits: int
    misses: int

    @property
    def is_diverged(self) -> bool:
        """Whether a run at this threshold diverged."""
        return math.isnan(self.gap.mean)

    @property
    def hit_rate(self) -> float:
        """Share of verified products that reached the threshold; NaN if none was verified."""
        verified = self.hits + self.misses
        return self.hits / verified if verified else math.nan

    def gap_text(self) -> str:
        """`+0.12 % ± 0.05 %`, the interval of 95 %; with one seed it is `?`."""
        half = "?" if math.isnan(self.gap.half_width) else f"{self.gap.half_width:.2f} %"
        return f"{self.gap.mean:+.2f} % ± {half}"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The results at all thresholds.

    Attributes:
        config: name of the configuration.
        steps: number of steps of each run.
        last: number of steps at the end whose mean loss is compared.
        max_gap: the largest allowed gap, in %.
        reference: seed → loss of bf16.
        outcomes: results by threshold, ascending.
        num_mixed: runs on another kind of processor than that of the reference with their seed.
    """

    config: str
    steps: int
    last: int
    max_gap: float
    reference: Mapping[int, float]
    outcomes: tuple[ThresholdOutcome, ...]
    num_mixed: int = 0

    @property
    def suggestion(self) -> ThresholdOutcome | None:
        """The lowest threshold with an allowed gap, or `None`."""
        return next((each for each in self.outcomes if each.gap.mean <= self.max_gap), None)

    def table(self) -> str:
        """A text table of thresholds, losses, gaps, shares and hits, and the suggestion."""
        candidates = next((list(each.shares) for each in self.outcomes if each.shares), [])
        seeds, reference = counted(len(self.reference), "seed"), statistics.mean(self.reference.values())
        lines = [
            f"mean loss of the last {self.last} of {self.steps} steps, {self.config}, {seeds}",
            "threshold      loss      gap to bf16 (95 %)   ≤ 8 bits"
            + "".join(name.rjust(10) for name in candidates)
            + "hits".rjust(18),
            f"{REFERENCE:>9}{reference:10.4f}",
        ]
        for each in self.outcomes:
            start = f"{each.threshold_db:>6g} dB"
            if each.is_diverged:
                lines.append(f"{start}  diverged")
                continue
            shares = "".join(f"{100 * share:8.1f} %" for share in (each.share_8bit, *each.shares.values()))
            verified = each.hits + each.misses
            hits = f"{100 * each.hit_rate:.1f} % of {verified:,}" if verified else "-"
            loss = statistics.mean(each.losses.values())
            lines.append(f"{start}{loss:10.4f}{each.gap_text():>24} {shares}{hits:>18}")
        return "\n".join([*lines, "", *self._suggestion_lines()])

    def _suggestion_lines(self) -> list[str]:
        best = self.suggestion
        if best is None:
            known = [each for each in self.outcomes if not each.is_diverged]
            if not known:
                return [f"no threshold keeps the gap within {self.max_gap:g} %: all runs diverged"]
            least = min(known, key=lambda each: each.gap.mean)
            return [
                f"no threshold keeps the gap within {self.max_gap:g} %: the smallest is {least.gap_text()}, "
                f"at {least.threshold_db:g} dB",
                "try higher thresholds, or candidates without the cheapest precision",
            ]
        lines = [
            f"suggested: {KEY}.threshold_db = {best.threshold_db:g}, with {100 * best.share_8bit:.1f} % at 8 "
            f"bits or fewer and a gap of {best.gap_text()} (allowed: {self.max_gap:g} %)"
        ]
        if math.isnan(best.gap.half_width):
            lines.append("how uncertain the gap is, is unknown with one seed: use three or more")
        elif best.gap.mean + best.gap.half_width > self.max_gap:
            lines.append(
                f"within its interval, that gap may exceed {self.max_gap:g} %: use more seeds or steps"
            )
        higher = [each for each in self.outcomes if each.threshold_db > best.threshold_db]
        if any(each.gap.mean > self.max_gap for each in higher):
            lines.append(
                "a higher threshold has a larger gap, so gaps of this size are noise: use more seeds"
            )
        if self.num_mixed:
            lines.append(
                f"{counted(self.num_mixed, 'run')} had another kind of processor than bf16 with the same "
                "seed, which adds noise to the gap"
            )
        diverged = [f"{each.threshold_db:g} dB" for each in higher if each.is_diverged]
        if diverged:
            lines.append(
                f"{' and '.join(diverged)} diverged but {best.threshold_db:g} dB did not: inspect those "
                "runs, or use more seeds"
            )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; unknown values are `None`."""
        return {
            "config": self.config,
            "steps": self.steps,
            "last": self.last,
            "max_gap_percent": self.max_gap,
            "reference": {str(seed): loss for seed, loss in self.reference.items()},
            "thresholds": [
                {
                    "threshold_db": each.threshold_db,
                    "losses": {str(seed): _or_none(loss) for seed, loss in each.losses.items()},
                    "gap_percent": _or_none(each.gap.mean),
                    "gap_half_width_percent": _or_none(each.gap.half_width),
                    "share_8bit_or_less": _or_none(each.share_8bit),
                    "shares": dict(each.shares),
                    "hit_rate": _or_none(each.hit_rate),
                    "hits": each.hits,
                    "misses": each.misses,
                }
                for each in self.outcomes
            ],
            "suggested_threshold_db": None if self.suggestion is None else self.suggestion.threshold_db,
        }


def calibrate(plan: CalibrationPlan, *, has_picture: bool = True) -> Calibration:
    """Finish all runs, print a table, and write table.txt, table.json and calibration.png.

    Raises:
        UserError: the configuration is not suitable (raised before the first run), or a run failed.
    """
    if has_picture:
        require_matplotlib()
    runs = plan.runs()
    steps, last = _check(plan, runs)
    make_folder(plan.out)
    counts = (
        f"{counted(len(plan.thresholds), 'threshold')} and {REFERENCE} × {counted(len(plan.seeds), 'seed')}"
    )
    print(f"{counts}, {steps} steps of {plan.config.name}, {plan.out}", flush=True)
    execute([run for run in runs if not run.is_complete()], jobs=plan.jobs)
    found = _evaluate(plan, runs, steps=steps, last=last)
    table = found.table()
    print(f"\n{table}")
    with atomic_file(plan.out / "table.txt") as file:
        file.write(table + "\n")
    with atomic_file(plan.out / "table.json") as file:
        file.write(json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")
    if has_picture:
        picture = plan.out / "calibration.png"
        draw_calibration(
            picture,
            thresholds=[each.threshold_db for each in found.outcomes],
            gaps=[each.gap.mean for each in found.outcomes],
            half_widths=[each.gap.half_width for each in found.outcomes],
            shares=[each.shares for each in found.outcomes],
            max_gap=plan.max_gap,
            suggestion=None if found.suggestion is None else found.suggestion.threshold_db,
        )
        print(f"picture: {picture}")
    return found


def label(threshold: float) -> str:
    """The name of runs at a threshold: 7.5 → `7.5-dB`."""
    return f"{threshold:.12g}-dB"


def _checked_thresholds(thresholds: Sequence[float]) -> tuple[float, ...]:
    """Thresholds, ascending and without duplicates; two with the same name or folder are rejected."""
    for value in thresholds:
        if not (is_finite_number(value) and value >= 0):
            raise UserError(f"--threshold {value} is not an SNR in dB: give a number ≥ 0, such as 15")
    found = sorted(set(thresholds))
    for one, two in itertools.combinations(found, 2):
        if f"{one:g}" == f"{two:g}" or folder_name(label(one), 0) == folder_name(label(two), 0):
            raise UserError(
                f"--threshold {one!r} and --threshold {two!r} have the same name, {one:g} dB: leave one out"
            )
    return tuple(found)


def _check(plan: CalibrationPlan, runs: Sequence[Run]) -> tuple[int, int]:
    """Validate the configuration of all runs; returns the steps of a run and the number of compared steps."""
    base = load_checked_config(plan.config, [], world_size=1)
    if base.settings.of(SpeculationSettings) is None:
        raise UserError(
            f"{plan.config} has no megalowbit.speculation section, which a calibration needs: add one"
        )
    resolved = [run.resolved() for run in runs]  # all, because a mistake may concern one threshold or seed
    steps = resolved[0].settings.run.steps
    last = max(1, steps // LAST_PART) if plan.last is None else min(plan.last, steps)
    count_samples(base.settings.data)  # fills the cache before several processes would do it at once
    return steps, last


def _evaluate(plan: CalibrationPlan, runs: Sequence[Run], *, steps: int, last: int) -> Calibration:
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    reference = {run.seed: run.final_loss(last) for run in by_label[REFERENCE]}
    for seed, loss in reference.items():
        if not loss > 0:
            raise UserError(
                f"{REFERENCE}, seed {seed}, ended at a loss of {loss}: fix the configuration first"
            )
    outcomes = [
        _outcome(threshold, by_label[label(threshold)], reference, last) for threshold in plan.thresholds
    ]
    return Calibration(
        config=plan.config.name,
        steps=steps,
        last=last,
        max_gap=plan.max_gap,
        reference=reference,
        outcomes=tuple(outcomes),
        num_mixed=_num_mixed(runs),
    )


def _num_mixed(runs: Sequence[Run]) -> int:
    origins = {run.seed: run.begun_with() for run in runs if run.label == REFERENCE}
    pairs = [(origins[run.seed], run.begun_with()) for run in runs]
    return sum(one is not None and two is not None and one.same_place(two) is False for one, two in pairs)


def _outcome(
    threshold: float, runs: Sequence[Run], reference: Mapping[int, float], last: int
) -> ThresholdOutcome:
    losses = {run.seed: run.final_loss(last) for run in runs}
    percent = {seed: 100 * loss / reference[seed] for seed, loss in losses.items()}
    gap = Gap.between(percent, dict.fromkeys(percent, 100.0))
    totals = [] if math.isnan(gap.mean) else [_totals(run) for run in runs]
    candidates = totals[0]["shares"] if totals else {}
    return ThresholdOutcome(
        threshold_db=threshold,
        losses=losses,
        gap=gap,
        shares={name: statistics.mean(each["shares"][name] for each in totals) for name in candidates},
        share_8bit=statistics.mean(each["share_8bit_or_less"] for each in totals) if totals else math.nan,
        hits=sum(each["hits"] for each in totals),
        misses=sum(each["misses"] for each in totals),
    )


def _totals(run: Run) -> dict[str, Any]:
    """The speculation section of a run's summary."""
    summary = run.folder / SUMMARY
    section = run.read_object(summary).get("speculation")
    if not isinstance(section, dict):
        raise UserError(f"{summary} has no speculation section ({shown(section)}): choose another --out")
    settings = run.resolved().settings.of(SpeculationSettings)
    shares = section.get("shares")
    if settings is None or not isinstance(shares, dict) or set(shares) != set(settings.candidates):
        run.refuse(summary, "speculation.shares do not match the candidates")
    numbers = [*shares.values(), *(section.get(key) for key in ("share_8bit_or_less", "hits", "misses"))]
    if not all(is_finite_number(each) and each >= 0 for each in numbers):
        run.refuse(summary, "speculation contains an invalid share or count")
    return section


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
