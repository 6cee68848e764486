"""The late switch: after a given step, layers run in high precision; reports the loss before and after.

The step alone determines whether layers are switched, so a checkpoint needs no flag: a run that loads a
checkpoint from after the switch switches its layers. The checkpoint holds the losses around the switch for
the two lines that are printed: the mean loss of the steps before it, and later the mean loss since. These are
the means over all ranks that the loop reads anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from megalowbit.errors import UserError, shown
from megalowbit.pretrain.components.base import Component, RunParts, RunSettings, Summary
from megalowbit.telemetry.facts import Facts
from megalowbit.values import SettingsModel, counted, unit

if TYPE_CHECKING:
    from torch import nn

    from megalowbit.layers.recipe import Recipe

KEY = "megalowbit.late_switch"
WINDOW = 20  # steps in each mean loss
AS_STORED, AS_RECIPE = FORWARDS = ("checkpoint", "recipe")  # of an evaluation: whether a switch counts


class LateSwitchSettings(SettingsModel):
    """When the low-bit layers stop quantising, and in which of their products."""

    at: int | float = Field(
        description="optimizer steps before the switch (≥ 1), or a fraction of `run.steps` (between 0 and 1)",
        json_schema_extra=unit("steps"),
    )
    scope: Literal["forward", "all"] = Field(
        default="forward",
        description="`forward`: the forward product runs in high precision, the backward products are "
        "quantised as before. `all`: nothing is quantised",
    )

    @field_validator("at", mode="before")
    @classmethod
    def _is_a_step_or_a_fraction(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        if isinstance(value, float) and 0 < value < 1:
            return value
        raise ValueError("expected a whole number of steps ≥ 1, or a fraction of run.steps between 0 and 1")

    def step(self, total_steps: int) -> int:
        """Optimizer steps before the switch; a fraction leaves a step on both sides, if there are two."""
        if isinstance(self.at, int):
            return self.at
        return max(1, min(round(self.at * total_steps), total_steps - 1))


def kept_switch(settings: LateSwitchSettings | None, steps: int) -> str:
    """What to set so that a run of `steps` steps may continue: a fraction of more steps is a later switch."""
    if settings is None or isinstance(settings.at, int):
        return ""
    return f", with the switch where it was: {_as_set(settings.step(steps), settings.scope)}"


def _as_set(step: int, scope: str) -> str:
    return f'{KEY} = {{"at": {step}, "scope": "{scope}"}}'


class Phase(NamedTuple):
    """A part of the run with one recipe: before or after a late switch."""

    share: float
    recipe: Recipe


def phases(settings: LateSwitchSettings | None, recipe: Recipe, total_steps: int) -> tuple[Phase, ...]:
    """The parts of a run with this recipe."""
    if settings is None or not recipe.quantizes or (step := settings.step(total_steps)) >= total_steps:
        return (Phase(1.0, recipe),)
    from megalowbit.layers.conversion.precision_switch import switched

    before = step / total_steps
    return Phase(before, recipe), Phase(1 - before, switched(recipe, settings.scope))


class LateSwitch(Component):
    """Switches the layers of a model after a given step.

    Args:
        settings: when to switch, and which products.
        model: the converted model.
        recipe: its recipe.
        total_steps: optimizer steps of the run.
        num_layers: low-bit layers of the full model; a pipeline stage may have none.

    Attributes:
        step: optimizer steps before the switch.
        recipe: the recipe of the layers after the switch.
        is_switched: whether the layers are switched now.

    Raises:
        UserError: the recipe quantises nothing that could be switched.
    """

    key = "late_switch"
    settings_class = LateSwitchSettings
    description = (
        "from this step on, run the layers in high precision; off unless set. No effect if the recipe "
        "quantises nothing"
    )
    may_change = (KEY, f"{KEY}.*")  # unless it conflicts with the steps trained so far: see `check_resumed`

    def __init__(
        self,
        settings: LateSwitchSettings,
        model: nn.Module,
        recipe: Recipe,
        *,
        total_steps: int,
        num_layers: int,
    ) -> None:
        from megalowbit.layers.conversion.precision_switch import switched

        self.recipe = switched(recipe, settings.scope)
        self.step, self.is_switched = settings.step(total_steps), False
        self._scope, self._model = settings.scope, model
        self._num_layers = num_layers
        self._reported_at = min(self.step + WINDOW, total_steps)
        self._former: dict[str, Recipe] = {}  # recipes of the layers before the switch, to undo it
        self._before: list[float | None] = []  # losses of the last steps before the switch
        self._since: list[float | None] = []  # losses of the first steps after it

    @classmethod
    def build(cls, settings: LateSwitchSettings, parts: RunParts) -> LateSwitch | None:
        """Build it; None if the recipe quantises nothing, as in a bf16 baseline."""
        if not parts.recipe.quantizes:
            return None
        return cls(
            settings,
            parts.engine.module,
            parts.recipe,
            total_steps=parts.run.steps,
            num_layers=parts.num_layers,
        )

    @classmethod
    def check(cls, settings: LateSwitchSettings, run: RunSettings, recipe: object) -> None:
        """Reject a switch after the last step; a fraction in a run of one step means none."""
        if isinstance(settings.at, int) and settings.at >= run.steps:
            raise UserError(
                f"{KEY}.at = {settings.at} leaves no step after the switch, because megalowbit.run.steps is "
                f"{run.steps}: lower at, or leave late_switch out"
            )

    @classmethod
    def check_recipe(cls, settings: LateSwitchSettings, recipe: Recipe) -> None:
        """Reject a recipe that quantises, but nothing that could be switched."""
        from megalowbit.layers.conversion.precision_switch import switched

        if recipe.quantizes:
            switched(recipe, settings.scope)

    @classmethod
    def check_resumed(cls, saved: Mapping[str, Any], current: Mapping[str, Any], *, step: int) -> None:
        """Reject settings with which the steps trained so far would have run in other precisions.

        A switch in the future may be moved, added or removed. A fraction is resolved with the current
        run.steps.
        """
        before, now = _switch(saved), _switch(current)
        if before == now or all(each is None or each[0] >= step for each in (before, now)):
            return
        remedy = "leave late_switch out" if before is None else f"resume with {_as_set(*before)}"
        raise UserError(
            f"{KEY} would switch {_described(now)}, but in the {step} steps trained so far the run to resume "
            f"has switched {_described(before)}: {remedy}, or start a new run from its weights with "
            "megalowbit.model.checkpoint"
        )

    def startup_line(self) -> str:
        return f"switch    after step {self.step}: {self.recipe.name}"

    def before_step(self, step: int) -> str | None:
        """Switch if the last step before the switch has just been trained."""
        if step != self.step:
            return None
        self.switch()
        return (
            f"precision switched after step {step}: {counted(self._num_layers, 'layer')} now "
            f"{'uses' if self._num_layers == 1 else 'use'} {self.recipe.name}; "
            f"{_mean_loss(self._before)} before"
        )

    def facts(self, known: Facts) -> Facts:
        """Whether the step was trained after the switch."""
        return {"precision_switched": int(self.is_switched)}

    def after_step(self, step: int, facts: Facts) -> Iterable[str]:
        """Record the loss; report its mean `WINDOW` steps after the switch, or at the end of the run."""
        loss = facts["loss"]
        assert isinstance(loss, float)
        # None: the checkpoint's state is JSON-like, and one skipped step must not make the mean NaN
        value = loss if math.isfinite(loss) else None
        if step <= self.step:
            self._before = [*self._before, value][-WINDOW:]
            return ()
        if step > self.step + WINDOW:
            return ()
        self._since.append(value)
        if step != self._reported_at:
            return ()
        return (
            f"precision switched after step {self.step}: {_mean_loss(self._since)} since, "
            f"{_mean_loss(self._before)} before",
        )

    def summary(self) -> Summary:
        """The switch and the mean losses around it (None if unknown); empty before the switch."""
        if not self.is_switched:
            return Summary()
        entry = {
            "step": self.step,
            "scope": self._scope,
            "loss_before": _mean(self._before),
            "loss_after": _mean(self._since),
        }
        return Summary(entries={"late_switch": entry})

    def state_dict(self) -> dict[str, Any]:
        """The losses around the switch."""
        return {"before": list(self._before), "since": list(self._since)}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        """Restore the losses; switch the layers if `step` is after the switch, otherwise undo a switch."""
        state = state or {"before": [], "since": []}
        self._before, self._since = list(state["before"]), list(state["since"])
        if step > self.step:
            self.switch()
        elif self.is_switched:
            self.undo()

    def switch(self) -> None:
        """Give the layers the recipes of after the switch, if they do not have them."""
        from megalowbit.layers.conversion.convert import bit_layers
        from megalowbit.layers.conversion.precision_switch import quantizes_in, switch_precision

        if self.is_switched:
            return
        layers = bit_layers(self._model)
        self._former = {name: layer.recipe for name, layer in layers.items()}
        # a pipeline stage may have no layer, or none whose own recipe quantises in this scope
        if any(quantizes_in(former, self._scope) for former in self._former.values()):
            switch_precision(self._model, self._scope)
        self.is_switched = True

    def undo(self) -> None:
        """Give the layers their former recipes again, if they are switched."""
        from megalowbit.layers.conversion.convert import bit_layers

        layers = bit_layers(self._model)
        for name, former in self._former.items():
            layers[name].recipe = former
        self.is_switched = False


def _switch(config: Mapping[str, Any]) -> tuple[int, str] | None:
    """Step and scope of a resolved configuration's switch."""
    block = config["megalowbit"]
    if block.get("late_switch") is None:  # also what earlier versions wrote
        return None
    settings = LateSwitchSettings.model_validate(block["late_switch"])
    return settings.step(block["run"]["steps"]), settings.scope


def _described(switch: tuple[int, str] | None) -> str:
    return "nothing" if switch is None else f"{shown(switch[1])} after step {switch[0]}"


def _mean_loss(losses: list[float | None]) -> str:
    mean, count = _mean(losses), sum(loss is not None for loss in losses)
    if mean is None:
        return "no finite loss in the steps"
    steps = f"the {count} steps" if count > 1 else "the step"
    return f"mean loss {mean:.4f} over {steps}"


def _mean(losses: list[float | None]) -> float | None:
    """Mean of the finite losses; None if there are none."""
    finite = [loss for loss in losses if loss is not None]
    return sum(finite) / len(finite) if finite else None
