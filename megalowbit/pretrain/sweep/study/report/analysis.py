"""What the results of a study show: gaps to the baseline, their uncertainty, and which recipes differ.

A pair is a cell and the baseline's cell of the same size, text, length and seed: equal initial weights and
batches. Gaps are taken within pairs. Where the baseline has forks, which began as other runs and went on as
the baseline, gaps are to the mean of all of them: a single path may be lucky, and a gap would be its luck.

A group has one size and one length, and one text or all of them; its pairs are the seeds for which both cells
are finished. With all texts, the value of a seed is the mean over them, because results of one seed on
several texts are no independent draws of a text.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megalowbit.pretrain.sweep.study.cells import Cell
from megalowbit.pretrain.sweep.study.report.finished import Finished, Key, check_equal_tokens, finished_cells
from megalowbit.pretrain.sweep.study.report.learning_rates import learning_rates
from megalowbit.pretrain.sweep.study.report.statistics import Comparison, Estimate, compare_all, delay
from megalowbit.pretrain.sweep.study.results import Origin, block_of
from megalowbit.pretrain.sweep.study.study_file import ALL_TEXTS, StudySettings

CURVE_POINTS = 40
DELAY_POINTS = 160  # 3,000 steps in blocks of 25 have fewer


@dataclass(frozen=True)
class Row:
    """A recipe or replica in a group.

    Attributes:
        label: its name.
        reference: what it is compared with.
        num_diverged: cells that have diverged; they have no gaps.
        gaps: mark → gap of the training loss; the last mark is the end.
        percent: the gap at the end in % of the reference's loss.
        steps_behind: `statistics.delay` of the mean loss at the end and the reference's mean curve.
        heldout_bf16: gap of the held-out loss in bf16.
        heldout_own: gap of the held-out loss, each in its own precision.
        forward_noise: held-out loss of the same weights in their own precision minus that in bf16.
        cpu: CPU time of a step, relative to the reference's: the median of pairs that ran alike.
        curve: step → mean gap, for a picture.
    """

    label: str
    reference: str
    num_diverged: int
    gaps: Mapping[int, Estimate]
    percent: Estimate | None
    steps_behind: float | None
    heldout_bf16: Estimate | None
    heldout_own: Estimate | None
    forward_noise: Estimate | None
    cpu: float | None
    curve: Mapping[int, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the curve follows from the losses of the cells."""
        values = {name: value for name, value in vars(self).items() if not isinstance(value, Mapping)}
        plain = {
            name: value.to_dict() if isinstance(value, Estimate) else value for name, value in values.items()
        }
        gaps = {str(mark): gap.to_dict() for mark, gap in self.gaps.items()}
        return {**plain, "gaps": gaps}


@dataclass(frozen=True)
class Group:
    """The comparison of all recipes at one size and length, on one text or all.

    Attributes:
        study: the study.
        size: name of the size.
        steps: length of the runs.
        text: name of the text, or `all`.
        members: label → its finished cells, by text and seed.
    """

    study: StudySettings
    size: str
    steps: int
    text: str
    members: Mapping[str, Mapping[Key, Finished]] = field(repr=False)

    @property
    def marks(self) -> list[int]:
        """Steps at which gaps are given."""
        return [*sorted(mark for mark in self.study.marks if mark < self.steps), self.steps]

    @property
    def baseline(self) -> Mapping[Key, Finished]:
        """The baseline's cells."""
        return self.members.get(self.study.baseline, {})

    @property
    def title(self) -> str:
        """`0.8M, 1500 steps, text python`."""
        texts = "all texts" if self.text == ALL_TEXTS else f"text {self.text}"
        return f"{self.size}, {self.steps} steps, {texts}"

    @cached_property
    def rows(self) -> list[Row]:
        """The recipes against the baseline."""
        others = {self.study.baseline, *self._repeats}
        found = [self._row(label, self.study.baseline) for label in self.members if label not in others]
        return [row for row in found if row is not None]

    @property
    def without_value(self) -> list[str]:
        """Labels that have no row, because none of their seeds has a whole pair on each text."""
        shown = {self.study.baseline, *(row.label for row in (*self.rows, *self.noise))}
        return [label for label in self.members if label not in shown]

    @cached_property
    def noise(self) -> list[Row]:
        """Replicas and forks against what they repeat."""
        rows = [self._row(label, of) for label, of in self._repeats.items() if label in self.members]
        return [row for row in rows if row is not None]

    @property
    def _repeats(self) -> dict[str, str]:
        """Replicas and forks, and what they repeat."""
        forks = dict.fromkeys(self.study.baseline_forks, self.study.baseline)
        return forks | {each.name: each.of for each in self.study.replicas}

    def differences(self, label: str, reference: str, value: Callable[[Finished], float]) -> list[float]:
        """Finite differences of a value, one for each seed."""
        own, peer = self.members.get(label, {}), self._peers(label, reference, value)
        found = {key: value(own[key]) - peer[key] for key in own if key in peer}
        return list(self._by_seed(found).values())

    def _peers(self, label: str, reference: str, value: Callable[[Finished], float]) -> dict[Key, float]:
        """The values that those of `label` are compared with: for recipes, the means over all forks."""
        runs = [self.members.get(reference, {})]
        if reference == self.study.baseline and label not in self._repeats:
            runs += self._forks
        common = [key for key in runs[0] if all(key in cells for cells in runs)]
        return {key: statistics.fmean(value(cells[key]) for cells in runs) for key in common}

    @property
    def _forks(self) -> list[Mapping[Key, Finished]]:
        """The cells of each fork of which any is finished."""
        return [self.members[fork] for fork in self.study.baseline_forks if fork in self.members]

    def num_without_fork(self) -> int:
        """Baseline's cells that enter no gap, because a fork of them is not finished or has diverged."""
        return sum(
            any(key not in cells or cells[key].is_diverged for cells in self._forks) for key in self.baseline
        )

    @property
    def diverged_baselines(self) -> list[Key]:
        """Texts and seeds with which the baseline has diverged: their pairs have no gap from then on."""
        return sorted(key for key, each in self.baseline.items() if each.is_diverged)

    @property
    def texts(self) -> set[str]:
        """The texts of its cells."""
        return {text for cells in self.members.values() for text, _ in cells}

    def differences_at_end(self, label: str) -> list[float]:
        """The finite gaps of a recipe to the baseline at the end, one for each seed."""
        found = self.differences(label, self.study.baseline, _loss_to(self.steps))
        return [each for each in found if not math.isnan(each)]

    def _by_seed(self, values: Mapping[Key, float]) -> dict[int, float]:
        """The mean over the group's texts for each seed that has a finite value for all of them."""
        texts = self.texts
        found: dict[int, list[float]] = {}
        for (_, seed), value in values.items():
            if not math.isnan(value):
                found.setdefault(seed, []).append(value)
        return {seed: statistics.fmean(each) for seed, each in found.items() if len(each) == len(texts)}

    @cached_property
    def drifts(self) -> list[float]:
        """What finished forks of the baseline differ from it by at the end, a number for each single pair.

        Without any, what replicas differ by, which may stay near the path that they repeat.
        """
        found = []
        repeats = {label: of for label, of in self._repeats.items() if label in self.members}
        forks = {label: of for label, of in repeats.items() if label in self.study.baseline_forks}
        for label, of in (forks or repeats).items():
            own, peer = self.members.get(label, {}), self.members.get(of, {})
            found += [own[k].loss_to(self.steps) - peer[k].loss_to(self.steps) for k in own if k in peer]
        return [each for each in found if not math.isnan(each)]

    def noise_floor(self) -> float | None:
        """The root mean square of `drifts`; None if neither a fork nor a replica is finished."""
        return math.sqrt(statistics.fmean(each**2 for each in self.drifts)) if self.drifts else None

    @cached_property
    def _origins(self) -> list[tuple[Origin, list[Origin]]]:
        """What each cell with a pair was made with, and what it is compared with: baseline and forks."""
        found = []
        for label, cells in self.members.items():
            references = [self.baseline, *([] if label in self._repeats else self._forks)]
            for key, each in cells.items():
                if label != self.study.baseline and key in self.baseline:
                    peers = [runs[key].result.made_with for runs in references if key in runs]
                    found.append((each.result.made_with, peers))
        return found

    @cached_property
    def _same_places(self) -> list[bool | None]:
        """For each pair whether all its cells were multiplied alike; None: it is not known."""
        found = [[own.same_place(peer) for peer in peers] for own, peers in self._origins]
        return [False if False in each else None if None in each else True for each in found]

    @property
    def num_mixed_pairs(self) -> int:
        """Pairs of a recipe and the baseline, or a fork of it, that were multiplied differently."""
        return self._same_places.count(False)

    @property
    def num_unknown_pairs(self) -> int:
        """Pairs of which the instructions were not recorded."""
        return self._same_places.count(None)

    @cached_property
    def mixed_versions(self) -> dict[str, int]:
        """Packages of which the cells of a pair had different versions, and the number of such pairs."""
        others = [
            {name for peer in peers for name, *_ in own.other_versions(peer)} for own, peers in self._origins
        ]
        return dict(Counter(name for found in others for name in found))

    def seed_deviation(self) -> float | None:
        """Standard deviation of the baseline's loss at the end over seeds, mean over texts."""
        by_text: dict[str, list[float]] = {}
        for (text, _), each in self.baseline.items():
            if not math.isnan(loss := each.loss_to(self.steps)):
                by_text.setdefault(text, []).append(loss)
        found = [statistics.stdev(values) for values in by_text.values() if len(values) > 1]
        return statistics.fmean(found) if found else None

    def final_losses(self, label: str) -> dict[int, float]:
        """Losses at the end by seed, without seeds of which a cell has diverged."""
        return self._by_seed(
            {key: each.loss_to(self.steps) for key, each in self.members.get(label, {}).items()}
        )

    @cached_property
    def not_ranked(self) -> list[str]:
        """Recipes of which a run has diverged, or a fork of the baseline: what is left is no fair sample."""
        found = [name for name in self._ranked_names if self._has_diverged(name)]
        if self.study.baseline not in found and any(map(self._has_diverged, self.study.baseline_forks)):
            found.append(self.study.baseline)
        return found

    def _has_diverged(self, label: str) -> bool:
        return any(each.is_diverged for each in self.members.get(label, {}).values())

    @property
    def _ranked_names(self) -> list[str]:
        return [
            recipe.name
            for recipe in self.study.recipes
            if recipe.name in self.members and recipe.name not in self.study.baseline_forks
        ]

    def comparisons(self) -> list[Comparison]:
        """All pairs of recipes at the end of training, with Holm's correction over the group."""
        names = [name for name in self._ranked_names if name not in self.not_ranked]
        losses = {name: self.final_losses(name) for name in names}
        if self.study.baseline in losses:
            losses[self.study.baseline] = self._by_seed(
                self._peers("", self.study.baseline, _loss_to(self.steps))
            )
        return compare_all(losses)

    def learning_rates(self) -> list[dict[str, Any]]:
        """What each sweep of learning rates shows; see `learning_rates.py`."""
        losses = {
            label: {} if self._has_diverged(label) else self.final_losses(label) for label in self.members
        }
        return learning_rates(self.study, losses)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "size": self.size,
            "steps": self.steps,
            "text": self.text,
            "texts": sorted(self.texts),
            "without_value": self.without_value,
            "marks": self.marks,
            "baseline": {
                "name": self.study.baseline,
                "cells": len(self.baseline),
                "forks": [fork for fork in self.study.baseline_forks if fork in self.members],
                "losses": {str(mark): self._baseline_mean(_loss_to(mark)) for mark in self.marks},
                "heldout_bf16": self._baseline_mean(lambda each: each.heldout("bf16")),
            },
            "rows": [row.to_dict() for row in self.rows],
            "noise": [row.to_dict() for row in self.noise],
            "noise_floor": self.noise_floor(),
            "noise_pairs": len(self.drifts),
            "pairs": len(self._origins),
            "mixed_pairs": self.num_mixed_pairs,
            "unknown_pairs": self.num_unknown_pairs,
            "mixed_versions": self.mixed_versions,
            "deviation_over_seeds": self.seed_deviation(),
            "separated": [
                {
                    "lower": min(pair := (each.first, each.second), key=lambda name: self._sign(each, name)),
                    "higher": max(pair, key=lambda name: self._sign(each, name)),
                    "difference": abs(each.difference.mean),
                    "adjusted_p": each.adjusted_p,
                }
                for each in self.comparisons()
                if each.is_separated
            ],
            "num_comparisons": len(self.comparisons()),
            "not_ranked": self.not_ranked,
            "learning_rates": self.learning_rates(),
        }

    def _baseline_mean(self, value: Callable[[Finished], float]) -> float | None:
        return _mean(self._peers("", self.study.baseline, value).values())

    def baseline_loss(self) -> float | None:
        """Mean loss of the baseline and its forks at the end."""
        return self._baseline_mean(_loss_to(self.steps))

    @staticmethod
    def _sign(comparison: Comparison, name: str) -> float:
        return comparison.difference.mean if name == comparison.first else 0.0

    def _row(self, label: str, reference: str) -> Row | None:
        own, peer = self.members.get(label, {}), self.members.get(reference, {})
        common = [key for key in own if key in peer]
        found = {mark: _estimate(self.differences(label, reference, _loss_to(mark))) for mark in self.marks}
        gaps = {mark: gap for mark, gap in found.items() if gap is not None}
        num_diverged = sum(own[key].is_diverged for key in common)
        if not gaps and not num_diverged:
            return None
        end = gaps.get(self.steps)
        losses = self._peers(label, reference, _loss_to(self.steps))
        keys = [key for key in common if key in losses]
        loss = _mean(self._by_seed({k: losses[k] for k in keys if not own[k].is_diverged}).values())
        noise = self._by_seed({key: own[key].heldout("own") - own[key].heldout("bf16") for key in keys})
        ratios = [
            own[key].cpu_seconds() / peer[key].cpu_seconds() for key in keys if own[key].ran_like(peer[key])
        ]
        return Row(
            label=label,
            reference=reference,
            num_diverged=num_diverged,
            gaps=gaps,
            percent=None if end is None or not loss else end.scaled(100 / loss),
            steps_behind=self._delay(label, reference),
            heldout_bf16=self._estimate(label, reference, lambda each: each.heldout("bf16")),
            heldout_own=self._estimate(label, reference, lambda each: each.heldout("own")),
            forward_noise=_estimate(list(noise.values())),
            cpu=_median(ratios),
            curve=self._curve(label, reference),
        )

    def _estimate(self, label: str, reference: str, value: Callable[[Finished], float]) -> Estimate | None:
        return _estimate(self.differences(label, reference, value))

    def _delay(self, label: str, reference: str) -> float | None:
        own = {key: each.loss_to(self.steps) for key, each in self.members[label].items()}
        last = self._peers(label, reference, _loss_to(self.steps))
        seeds = self._by_seed({key: own[key] - last[key] for key in own if key in last})
        keys = [key for key in last if key[1] in seeds]
        curve = {}
        for step in _thinned(self._curve_steps, DELAY_POINTS) if keys else ():
            peers = self._peers(label, reference, _loss_to(step))
            curve[step] = statistics.fmean(peers[key] for key in keys)
        return delay(statistics.fmean(own[key] for key in keys), curve) if keys else None

    @property
    def _curve_steps(self) -> range:
        block = block_of(self.study.window, self.study.marks, self.steps)
        return range(min(self.study.window, self.steps), self.steps + 1, block)

    def _curve(self, label: str, reference: str) -> dict[int, float]:
        steps = _thinned(self._curve_steps, CURVE_POINTS)
        means = {step: _mean(self.differences(label, reference, _loss_to(step))) for step in steps}
        return {step: mean for step, mean in means.items() if mean is not None}


def groups_of(study: StudySettings, cells: Sequence[Cell]) -> list[Group]:
    """The groups in which a recipe and the baseline have a finished cell in common.

    That of all texts is there if one of a single text is: it says what has no pair on each of them.

    Raises:
        UserError: cells that would be compared have not read the same number of tokens.
    """
    finished = finished_cells(cells)
    found: list[Group] = []
    for size, steps in dict.fromkeys((cell.size.name, cell.steps) for cell in cells):
        here = [each for each in finished if each.cell.size.name == size and each.cell.steps == steps]
        check_equal_tokens(here)
        texts = [text.name for text in study.texts if any(each.cell.text == text.name for each in here)]
        for text in [*texts, *([ALL_TEXTS] if len(texts) > 1 else [])]:
            members: dict[str, dict[Key, Finished]] = {}
            for each in here:
                if text in (ALL_TEXTS, each.cell.text):
                    members.setdefault(each.cell.label, {})[each.key] = each
            group = Group(study, size, steps, text, members)
            has_parts = text == ALL_TEXTS and any((each.size, each.steps) == (size, steps) for each in found)
            if group.rows or group.noise or has_parts:
                found.append(group)
    return found


def _thinned(every: Sequence[int], most: int) -> list[int]:
    """At most so many of them, the first and the last included."""
    count = min(most, len(every))
    return [every[round(number * (len(every) - 1) / max(1, count - 1))] for number in range(count)]


def _loss_to(step: int) -> Callable[[Finished], float]:
    return lambda each: each.loss_to(step)


def _estimate(values: Sequence[float]) -> Estimate | None:
    finite = [value for value in values if not math.isnan(value)]
    return Estimate.of(finite) if finite else None


def _mean(values: Iterable[float]) -> float | None:
    finite = [value for value in values if not math.isnan(value)]
    return statistics.fmean(finite) if finite else None


def _median(values: Iterable[float]) -> float | None:
    finite = [value for value in values if not math.isnan(value)]
    return statistics.median(finite) if finite else None
