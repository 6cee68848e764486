"""What the recipes of a study cost: bytes kept for backward, time of the products, and their share in FP4.

Computed from models and recipes (`layer_costs.py`), not measured: an emulation has other times. They are of
all layers that NVFP4 would convert; a layer that a recipe keeps counts as one in bfloat16.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.settings import ModelSettings
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.conversion.kept_layers import select_layers
from megalowbit.layers.recipe import Recipe, recipes
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.components.late_switch import LateSwitchSettings, phases
from megalowbit.pretrain.components.speculation import SpeculationSettings
from megalowbit.pretrain.sweep.layer_costs import SPEEDS, bytes_kept, multiply_adds, total
from megalowbit.pretrain.sweep.study.cells import Cell
from megalowbit.pretrain.sweep.study.study_file import RecipeEntry


@dataclass(frozen=True)
class RecipeCost:
    """The cost of a micro-batch.

    Attributes:
        size: name of the size.
        steps: length of the run, on which the share of a late switch may depend.
        label: name of the recipe.
        bytes_kept: between forward and backward; with a late switch, in the part of the run that keeps more.
        product_time: multiply-adds at the speed of bfloat16, mean over the run's steps.
        fp4_share: of the multiply-adds, those whose operands both have 4 bits; mean over the steps.
    """

    size: str
    steps: int
    label: str
    bytes_kept: float
    product_time: float
    fp4_share: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class _Layers:
    """The layers of a model that recipes may convert."""

    def __init__(self, settings: ModelSettings) -> None:
        self.plain = build_model(settings, seed=0, device="meta")
        converted = build_model(settings, seed=0, device="meta")
        convert(converted, "nvfp4", rank=0)
        self.shapes = {name: (layer.sizes, layer.siblings) for name, layer in bit_layers(converted).items()}

    def recipes_of(self, recipe: Recipe) -> dict[str, Recipe]:
        """The recipe of each layer: bf16 for one that it keeps."""
        chosen, kept = select_layers(self.plain, recipe).to_swap, recipes()["bf16"]
        return {name: recipe.of_layer(name) if name in chosen else kept for name in self.shapes}

    def bytes_kept(self, recipe: Recipe, tokens: int) -> float:
        """See `layer_costs.bytes_kept`, of all layers."""
        costs = []
        for name, each in self.recipes_of(recipe).items():
            sizes, siblings = self.shapes[name]
            costs.append(bytes_kept(each, sizes, tokens, siblings))
        return total(costs)

    def multiply_adds(self, recipe: Recipe, tokens: int) -> Counter[int]:
        """See `layer_costs.multiply_adds`, of all layers."""
        found: Counter[int] = Counter()
        for name, each in self.recipes_of(recipe).items():
            found.update(multiply_adds(each, self.shapes[name][0], tokens))
        return found


def costs_of(cells: Sequence[Cell]) -> list[RecipeCost]:
    """The costs of each recipe at each size and length, without replicas, other learning rates and stresses.

    Recipes whose cost is not known beforehand are left out: those with speculation or a parameter split.
    """
    first: dict[tuple[str, int, str], Cell] = {}
    for cell in cells:
        if cell.label == cell.entry.name and isinstance(cell.entry, RecipeEntry) and not cell.size.stress_of:
            first.setdefault((cell.size.name, cell.steps, cell.label), cell)
    layers: dict[str, _Layers] = {}
    found = []
    for (size, steps, label), cell in first.items():
        settings, chosen = cell.config.settings, recipe_of(cell.config.recipe)
        has_split = any(each.parameter_split is not None for each in chosen.variants)
        if has_split or settings.of(SpeculationSettings) is not None:
            continue
        if size not in layers:
            layers[size] = _Layers(settings.model)
        micro_batch = cell.config.parts.deepspeed["train_micro_batch_size_per_gpu"]
        tokens = micro_batch * settings.data.sequence_length
        parts = phases(settings.of(LateSwitchSettings), chosen, settings.run.steps)
        done: dict[int, float] = defaultdict(float)
        for part in parts:
            for bits, count in layers[size].multiply_adds(part.recipe, tokens).items():
                done[bits] += part.share * count
        found.append(
            RecipeCost(
                size=size,
                steps=steps,
                label=label,
                bytes_kept=max(layers[size].bytes_kept(part.recipe, tokens) for part in parts),
                product_time=sum(count / SPEEDS[bits] for bits, count in done.items()),
                fp4_share=done[4] / sum(done.values()),
            )
        )
    return found
