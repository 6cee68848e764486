"""The report of a conversion: converted layers, kept layers with reasons, and missed weights."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megalowbit.errors import UserError
from megalowbit.layers.recipe import Recipe
from megalowbit.values import counted


@dataclass(frozen=True)
class SwappedLayer:
    """A layer that was replaced by a BitLinear; `kind` is its former class."""

    name: str
    kind: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class KeptLayer:
    """A linear layer that was not replaced, and the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class MissedWeight:
    """A parameter of one or several matrices that takes part in a projection but stays in high precision.

    Attributes:
        name: name of the parameter.
        shape: shape of the parameter.
        reason: why it was not converted.
        owner_name: name of the module that holds it; a recipe's `keep` can list it.
    """

    name: str
    shape: tuple[int, ...]
    reason: str
    owner_name: str = ""


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Result of `convert`. Its text fits on one screen, with one line for layers of the same pattern.

    Attributes:
        recipe: the recipe applied.
        swapped: the converted layers, in the model's order.
        kept: in the model's order; linear layers, then other parameters that the recipe keeps, convolutions
            and routers.
        missed: weights that no low-bit layer can replace, in the model's order.
        unmatched: the recipe's `keep_if_present`, if the model has no layer that it names; without patterns
            of shipped recipes.
    """

    recipe: Recipe
    swapped: tuple[SwappedLayer, ...]
    kept: tuple[KeptLayer, ...]
    missed: tuple[MissedWeight, ...] = ()
    unmatched: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"recipe {self.recipe}"]
        if not self.recipe.quantizes:
            lines.append("nothing converted: this recipe quantises nothing")
        if self.swapped:
            lines.append(f"converted {counted(len(self.swapped), 'layer')} to BitLinear:")
            lines += _grouped((each.name, self._converted(each)) for each in self.swapped)
        if self.kept:
            lines.append(f"kept {counted(len(self.kept), 'layer')} in high precision:")
            lines += _grouped((each.name, f"{each.kind}: {each.reason}") for each in self.kept)
        if self.unmatched:
            lines.append(f"keep_if_present names no layer of this model: {', '.join(self.unmatched)}")
        if self.missed:
            stay = "stays" if len(self.missed) == 1 else "stay"
            missed = counted(len(self.missed), "weight")
            lines.append(f"missed {missed}, which {stay} in high precision:")
            lines += _grouped((each.name, f"{each.shape}: {each.reason}") for each in self.missed)
        return "\n".join(lines)

    def _converted(self, layer: SwappedLayer) -> str:
        """About a converted layer; with its recipe, if not all layers have the same."""
        own = f": {self.recipe.of_layer(layer.name).name}" if self.recipe.layers else ""
        return f"{layer.kind} {layer.in_features}→{layer.out_features}{own}"


def refuse_missed(missed: Collection[MissedWeight], recipe: Recipe) -> None:
    """Refuse to train a model if some of its projections would silently stay in high precision.

    Raises:
        UserError: `missed` is not empty.
    """
    if missed:
        raise UserError(
            f"{describe_missed(missed, recipe)}; name them in the recipe's keep "
            f"({keep_pattern(missed)!r}) to train them in high precision on purpose"
        )


def describe_missed(missed: Collection[MissedWeight], recipe: Recipe) -> str:
    """One line about the missed weights; there must be at least one."""
    first, others = next(iter(missed)), len(missed) - 1
    which = f"weight {first.name} {first.shape}" + (f" and {others} more" if others else "")
    return f"recipe {recipe.name!r} does not reach {which}: {first.reason}"


def keep_pattern(missed: Collection[MissedWeight]) -> str:
    """A pattern for a recipe's `keep` that matches the first of them and the same in other blocks."""
    first = next(iter(missed))
    return _pattern(first.owner_name or first.name)


def _pattern(name: str) -> str:
    """Numbers between dots as `*`: `h.11.mlp` → `h.*.mlp`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _grouped(layers: Iterable[tuple[str, str]]) -> list[str]:
    """Lines about layers, given by name and text; those of several blocks on one line, by pattern."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, text in layers:
        found[_pattern(name), text].append(name)
    return [
        f"  {names[0]}  {text}" if len(names) == 1 else f"  {pattern}  {text}  × {len(names)}"
        for (pattern, text), names in found.items()
    ]
