"""What a sweep of learning rates shows: the best rate of each recipe, and the gap there."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from megalowbit.pretrain.sweep.study.report.statistics import Estimate, compare_all
from megalowbit.pretrain.sweep.study.study_file import RecipeEntry, StudySettings

Losses = Mapping[int, float]  # at the end, by seed


def learning_rates(study: StudySettings, losses: Mapping[str, Losses]) -> list[dict[str, Any]]:
    """For each recipe with several factors of the learning rate: what they change, and the best one.

    The best rate has the lowest mean over the seeds that have all factors. `gap` is that of the recipe at its
    best rate to the baseline at its best rate, within all pairs of single runs, without forks. Both rates are
    chosen by these losses. Where no seed has all factors, as with a rate at which all runs diverge, there is
    no best one, and neither is a gap to it.

    Args:
        study: the study.
        losses: label → losses at the end, by seed, of its finished runs that have not diverged.
    """
    swept = {recipe.name: _by_factor(recipe, losses) for recipe in study.recipes}
    swept = {name: of_factors for name, of_factors in swept.items() if len(of_factors) > 1}
    peer = losses.get(study.baseline, {})
    if study.baseline in swept:
        common = _common(swept[study.baseline])
        peer = swept[study.baseline][_best(common)] if common else {}
    return [_described(name, of, {} if name == study.baseline else peer) for name, of in swept.items()]


def _described(name: str, losses: Mapping[str, Losses], peer: Losses) -> dict[str, Any]:
    common = _common(losses)
    factor = _best(common) if common else None
    comparisons = compare_all(losses) if common else []
    gaps = (
        []
        if factor is None
        else [losses[factor][seed] - peer[seed] for seed in losses[factor] if seed in peer]
    )
    means = {each: statistics.fmean(common[each].values()) if common else None for each in losses}
    return {
        "recipe": name,
        "num_seeds": 0 if factor is None else len(common[factor]),
        "mean_losses": means,
        "best_factor": factor,
        "gap": Estimate.of(gaps).to_dict() if gaps else None,
        "matters": any(each.is_separated for each in comparisons),
        "is_known": bool(comparisons),
    }


def _by_factor(recipe: RecipeEntry, losses: Mapping[str, Losses]) -> dict[str, Losses]:
    """Losses at the end, by factor of the learning rate of which any run is finished."""
    labels = {f"{factor:g}": recipe.label(factor) for factor in recipe.lr_factors}
    return {factor: losses[label] for factor, label in labels.items() if label in losses}


def _common(losses: Mapping[str, Losses]) -> dict[str, Losses]:
    """Losses of the seeds that all factors have; empty if there is none."""
    seeds = sorted(set.intersection(*map(set, losses.values()))) if losses else []
    return {factor: {seed: of[seed] for seed in seeds} for factor, of in losses.items()} if seeds else {}


def _best(losses: Mapping[str, Losses]) -> str:
    """The factor with the smallest mean loss."""
    return min(losses, key=lambda factor: statistics.fmean(losses[factor].values()))
