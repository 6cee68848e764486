"""How the gap of each recipe depends on the size of the model, for studies with at least three sizes.

Sizes are compared at one length: equal tokens, whatever the size. N counts all parameters of the model,
embeddings included, tied ones once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalowbit.hf.checkpoint import build_model
from megalowbit.pretrain.sweep.study.cells import Cell
from megalowbit.pretrain.sweep.study.report.analysis import Group
from megalowbit.pretrain.sweep.study.report.power_law import LEAST_SIZES, PowerLaw, fit
from megalowbit.pretrain.sweep.study.study_file import ALL_TEXTS


@dataclass(frozen=True)
class SizeTrends:
    """Power laws at one length, on one text or all.

    Attributes:
        baseline: what the gaps are to.
        steps: length of the runs.
        text: name of the text, or `all`.
        laws: recipe → its power law.
    """

    baseline: str
    steps: int
    text: str
    laws: Mapping[str, PowerLaw]

    @property
    def title(self) -> str:
        """`Gap over sizes, 1500 steps, all texts`."""
        texts = "all texts" if self.text == ALL_TEXTS else f"text {self.text}"
        return f"Gap over sizes, {self.steps} steps, {texts}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        laws = {label: law.to_dict() for label, law in self.laws.items()}
        return {"steps": self.steps, "text": self.text, "laws": laws}


def count_parameters(cells: Sequence[Cell]) -> dict[str, int]:
    """Name of a size → number of parameters."""
    first = {cell.size.name: cell for cell in reversed(cells)}
    return {
        name: build_model(cell.config.settings.model, seed=0, device="meta").num_parameters()
        for name, cell in first.items()
    }


def trends_of(groups: Sequence[Group], parameters: Mapping[str, int]) -> list[SizeTrends]:
    """The power laws of all recipes that have gaps at three sizes; a model under stress is no size.

    Args:
        groups: of a study.
        parameters: name of a size → number of parameters.
    """
    found = []
    for (steps, text), here in _by_length_and_text(groups).items():
        if _are_texts_mixed(here) or len(_tokens(here)) > 1:
            continue
        gaps: dict[str, dict[int, list[float]]] = {}
        for group in here:
            for row in group.rows:
                if values := group.differences_at_end(row.label):
                    of_size = gaps.setdefault(row.label, {}).setdefault(parameters[group.size], [])
                    of_size += values
        laws = {label: fit(values) for label, values in gaps.items() if len(values) >= LEAST_SIZES}
        if laws:
            found.append(SizeTrends(here[0].study.baseline, steps, text, laws))
    return found


def not_fitted(groups: Sequence[Group]) -> list[str]:
    """A sentence for each length whose sizes are not compared: their texts or numbers of tokens differ."""
    found = []
    for (steps, text), here in _by_length_and_text(groups).items():
        if len(here) < LEAST_SIZES:
            continue
        if len(counts := _tokens(here)) > 1:
            listed = ", ".join(f"{count:,}" for count in sorted(counts))
            found.append(f"No power law at {steps} steps, text {text}: sizes have read {listed} tokens.")
        elif _are_texts_mixed(here):  # `all` would mean other texts at each
            texts = "; ".join(f"{group.size}: {' and '.join(sorted(group.texts))}" for group in here)
            found.append(
                f"No power law over all texts at {steps} steps: sizes have different ones ({texts})."
            )
    return found


def _by_length_and_text(groups: Sequence[Group]) -> dict[tuple[int, str], list[Group]]:
    """The groups of models that are not under stress."""
    found: dict[tuple[int, str], list[Group]] = {}
    for group in groups:
        if group.study.size(group.size).stress_of is None:
            found.setdefault((group.steps, group.text), []).append(group)
    return found


def _tokens(groups: Sequence[Group]) -> set[int]:
    """How many tokens the runs have read, those that have diverged left out."""
    members = [each for group in groups for cells in group.members.values() for each in cells.values()]
    return {each.result.tokens for each in members if not each.is_diverged}


def _are_texts_mixed(groups: Sequence[Group]) -> bool:
    return len({frozenset(group.texts) for group in groups}) > 1
