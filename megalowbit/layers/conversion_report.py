"""What a conversion did: which layers were swapped, which were kept, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megalowbit.layers.recipe import Recipe


@dataclass(frozen=True)
class SwappedLayer:
    """A layer that is a BitLinear now; `kind` is what it was."""

    name: str
    kind: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class KeptLayer:
    """A linear layer that was left as it is, and the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Result of `convert`; prints on one screen, layers of equal pattern on one line.

    Attributes:
        recipe: the recipe applied.
        swapped: in the model's order.
        kept: in the model's order.
    """

    recipe: Recipe
    swapped: tuple[SwappedLayer, ...]
    kept: tuple[KeptLayer, ...]

    def __str__(self) -> str:
        lines = [f"recipe {self.recipe}"]
        if not self.recipe.quantizes:
            lines.append("nothing swapped: this recipe quantises nothing")
        if self.swapped:
            lines.append(f"swapped {len(self.swapped)} layers for BitLinear:")
            lines += _grouped(
                f"{_pattern(each.name)}  {each.kind} {each.in_features}→{each.out_features}"
                for each in self.swapped
            )
        if self.kept:
            lines.append(f"kept {len(self.kept)} linear layers:")
            lines += _grouped(f"{_pattern(each.name)}  {each.kind}: {each.reason}" for each in self.kept)
        return "\n".join(lines)


def _pattern(name: str) -> str:
    """Numbers between dots as `*`: `h.11.mlp` → `h.*.mlp`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _grouped(labels: Iterable[str]) -> list[str]:
    return [f"  {label}" + (f"  × {count}" if count > 1 else "") for label, count in Counter(labels).items()]
