"""What a sweep of learning rates shows: the best rate of each recipe, and the gap there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from megalowbit.pretrain.sweep.study.report.statistics import Estimate, compare_all
from megalowbit.pretrain.sweep.study.study_file import RecipeEntry, StudySettings

Losses = Mapping[int, float]  # at the end, by seed


def learning_rates(study: StudySettings, losses_of: Callable[[str], Losses]) -> list[dict[str, Any]]:
    """For each recipe with several factors of the learning rate: what they change, and the best one.

    The best rate has the lowest mean over the seeds that have all factors. `gap` is that of the recipe at its
    best rate to the baseline at its best rate, within all pairs of single runs, without forks. Both rates are
    chosen by these losses. Without a seed that has all factors, all but `recipe` and `mean_losses`, which has
    their names, is empty.

    Args:
        study: the study.
        losses_of: label → losses of its single runs at the end, by seed.
    """
    swept = {recipe.name: _losses_by_factor(recipe, losses_of) for recipe in study.recipes}
    swept = {name: losses for name, losses in swept.items() if len(losses) > 1}
    peer = losses_of(study.baseline)
    if common := _common(swept.get(study.baseline, {})):
        peer = swept[study.baseline][_best(common)]
    found = []
    for name, losses in swept.items():
        common = _common(losses)
        if not common:
            found.append({"recipe": name, "num_seeds": 0, "mean_losses": dict.fromkeys(losses)})
            continue
        factor = _best(common)
        comparisons = compare_all(losses)
        gaps = [losses[factor][seed] - peer[seed] for seed in losses[factor] if seed in peer]
        gap = Estimate.of(gaps) if gaps and name != study.baseline else None
        found.append(
            {
                "recipe": name,
                "num_seeds": len(common[factor]),
                "mean_losses": {each: statistics.fmean(of.values()) for each, of in common.items()},
                "best_factor": factor,
                "gap": None if gap is None else gap.to_dict(),
                "matters": any(each.is_separated for each in comparisons),
                "is_known": bool(comparisons),
            }
        )
    return found


def _losses_by_factor(recipe: RecipeEntry, losses_of: Callable[[str], Losses]) -> dict[str, Losses]:
    """Losses at the end, by factor of the learning rate that any seed has."""
    found = {factor: losses_of(recipe.label(factor)) for factor in recipe.lr_factors}
    return {f"{factor:g}": losses for factor, losses in found.items() if losses}


def _common(losses: Mapping[str, Losses]) -> dict[str, Losses]:
    """Losses of the seeds that all factors have; empty if there is none."""
    seeds = sorted(set.intersection(*map(set, losses.values()))) if losses else []
    return {factor: {seed: of[seed] for seed in seeds} for factor, of in losses.items()} if seeds else {}


def _best(losses: Mapping[str, Losses]) -> str:
    """The factor with the smallest mean loss."""
    return min(losses, key=lambda factor: statistics.fmean(losses[factor].values()))
