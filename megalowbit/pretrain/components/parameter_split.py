"""Splits weights into parameters during a run (`recipe.parameter_split`).

This component decides before which step; `engine/parameters/split.py` splits the parameters and their
optimizer state. It has no state in checkpoints, because the model's state already shows the split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalowbit.errors import UserError
from megalowbit.pretrain.components.base import Component, RunParts, RunSettings
from megalowbit.telemetry.facts import Facts


class ParameterSplitting(Component):
    """Splits weights before the steps at which a split is due.

    Args:
        split: the `ParameterSplit` of the run's recipe; a late switch may have removed it from layers.
        engine: the engine with the weights to split.
    """

    def __init__(self, split: Any, engine: Any) -> None:
        self._split, self._engine = split, engine
        self._num_split = 0  # weights split before the next step

    @classmethod
    def build(cls, settings: None, parts: RunParts) -> ParameterSplitting | None:
        """None if the recipe has no parameter split."""
        split = parts.recipe.parameter_split
        return None if split is None else cls(split, parts.engine)

    @classmethod
    def check(cls, settings: None, run: RunSettings, recipe: object) -> None:
        """Reject a split that is due after the last step."""
        warmup_steps: object = None
        while isinstance(recipe, Mapping) and warmup_steps is None:
            split = recipe.get("parameter_split", {})
            if not isinstance(split, Mapping):
                return
            warmup_steps = split.get("warmup_steps")
            recipe = recipe.get("base")
        if isinstance(warmup_steps, int) and warmup_steps >= run.steps:
            raise UserError(
                f"megalowbit.recipe.parameter_split.warmup_steps = {warmup_steps} is not below "
                f"megalowbit.run.steps = {run.steps}, so weights would never be split: lower it, raise "
                "megalowbit.run.steps, or leave parameter_split out"
            )

    def before_step(self, step: int) -> str | None:
        """Split the weights if that is due before the next step; collective."""
        from megalowbit.engine.parameters.split import split_weights
        from megalowbit.layers.conversion.convert import bit_layers

        self._num_split = 0
        if not self._split.is_due(step):
            return None
        if not any(layer.recipe.parameter_split for layer in bit_layers(self._engine.module).values()):
            return None  # a late switch has removed the split from all layers
        report = split_weights(self._engine)
        self._num_split = len(report.ranks)
        return f"before step {step + 1}: {report}"

    def facts(self, known: Facts) -> Facts:
        """The number of weights that were split before the step."""
        return {"weights_split": self._num_split}
