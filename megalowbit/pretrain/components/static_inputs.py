"""Records the range of the layers' inputs at the end of a run, for evaluation, generation and export.

With most recipes, what a token's layers compute depends on the other tokens of its batch, and servers use
recorded ("static") maxima instead: see `layers/conversion/static_inputs.py`. The record is part of the run's
checkpoints from the first recorded step on. It is kept on the device, and read only for a checkpoint. After a
late switch, when inputs are not quantised any more, their range is recorded all the same.

A repeated attempt at a step is recorded again; its inputs are the same. Validation in a run is not changed by
the record: it uses the numbers of each batch from the first step to the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from megalowbit.errors import UserError, shown
from megalowbit.pretrain.components.base import Component, RunParts, RunSettings, find
from megalowbit.pretrain.components.speculation import Speculation
from megalowbit.values import SettingsModel, unit

if TYPE_CHECKING:
    from torch import nn

    from megalowbit.layers.recipe import Recipe

KEY = "megalowbit.static_inputs"
SHARE, MOST = 0.02, 100  # by default, steps that are recorded: a share of the run, and at most so many


class StaticInputsSettings(SettingsModel):
    """How many steps are recorded."""

    last: int | float | None = Field(
        default=None,
        description="record the largest magnitude of each low-bit layer's inputs, and their mean if the "
        "recipe splits it, in so many optimizer steps at the end of the run, or in a fraction of `run.steps` "
        f"(between 0 and 1). 0: never. `null`: {SHARE:.0%} of the steps, at most {MOST}, if the forward "
        "product quantises inputs by numbers of a whole tensor; otherwise never",
        json_schema_extra=unit("steps"),
    )

    @field_validator("last", mode="before")
    @classmethod
    def _is_a_number_of_steps_or_a_fraction(cls, value: object) -> object:
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        if isinstance(value, float) and 0 < value < 1:
            return value
        raise ValueError("expected a whole number of steps ≥ 0, a fraction of run.steps below 1, or null")

    def steps(self, total_steps: int, *, is_needed: bool) -> int:
        """Recorded steps of a run."""
        if self.last is None:
            return min(MOST, max(1, round(SHARE * total_steps))) if is_needed else 0
        return self.last if isinstance(self.last, int) else max(1, round(self.last * total_steps))


class StaticInputRecord(Component):
    """Records the layers' inputs in the last steps.

    Args:
        model: the converted model, or a stage of it.
        recipe: its recipe, before a late switch.
        first: optimizer steps before the first recorded one.
    """

    key = "static_inputs"
    settings_class = StaticInputsSettings
    description = "record the range of the layers' inputs at the end of the run, for evaluation and export"
    may_change = (f"{KEY}.*",)

    def __init__(self, model: nn.Module, recipe: Recipe, *, first: int) -> None:
        from megalowbit.engine.pipeline.setup import groups_of
        from megalowbit.layers.conversion.static_inputs import InputRanges

        groups = groups_of(model)
        self._is_pipeline = groups is not None
        self._group = None if groups is None else groups.data  # ranks with the same layers, or shards of them
        self._ranges, self._first = InputRanges(model, recipe), first
        self._steps = 0  # recorded so far
        self._is_recording = False

    @classmethod
    def check(cls, settings: StaticInputsSettings, run: RunSettings, recipe: object) -> None:
        """Reject more steps than the run has."""
        if settings.steps(run.steps, is_needed=False) > run.steps:
            raise UserError(
                f"{KEY}.last = {settings.last} is more than megalowbit.run.steps = {run.steps}: lower it"
            )

    @classmethod
    def check_recipe(cls, settings: StaticInputsSettings, recipe: Recipe) -> None:
        """Reject a record of layers that are not there."""
        if settings.last and not recipe.quantizes:
            raise UserError(
                f"last = {settings.last}, but recipe {shown(recipe.name)} has no low-bit layers: leave it out"
            )

    @classmethod
    def build(cls, settings: StaticInputsSettings, parts: RunParts) -> StaticInputRecord | None:
        from megalowbit.layers.conversion.static_inputs import needs_static_inputs

        # candidates of speculation may have one scale a tensor where the recipe has none
        is_needed = find(parts.earlier, Speculation) is not None
        is_needed = is_needed or any(map(needs_static_inputs, parts.recipe.variants))
        steps = settings.steps(parts.run.steps, is_needed=is_needed)
        if not (steps and parts.num_layers):
            return None
        return cls(parts.engine.module, parts.recipe, first=parts.run.steps - steps)

    def before_step(self, step: int) -> None:
        """Record the next step, if it is one of the last."""
        is_recording = step >= self._first
        if is_recording != self._is_recording:
            self._ranges.record(is_on=is_recording)
        self._is_recording = is_recording
        self._steps += is_recording

    def state_dict(self) -> dict[str, Any]:
        """The ranges of all layers over all ranks; collective."""
        from megalowbit.distributed.agreement import gather

        if not self._steps:
            return {"steps": 0, "ranges": {}}
        ranges = self._ranges.state_dict(self._group)
        if self._is_pipeline:
            ranges = {name: each for stage in gather(ranges) for name, each in stage.items()}
        return {"steps": self._steps, "ranges": ranges}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        """Continue with the ranges in the checkpoint, if it is from one of the last steps."""
        from megalowbit.distributed import process_group

        if state is None or step <= self._first:
            state = {"steps": 0, "ranges": {}}
        self._steps = state["steps"]
        self._ranges.load_state_dict(state["ranges"], is_first=process_group.rank(self._group) == 0)


def static_inputs_in(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a checkpoint holds for readers (`StaticInputs.to_dict`), from `StaticInputRecord.state_dict`.

    None: nothing has been recorded.
    """
    from megalowbit.layers.conversion.static_inputs import static_inputs_of

    if state is None or not state["steps"]:
        return None
    return static_inputs_of(state["ranges"]).to_dict()
