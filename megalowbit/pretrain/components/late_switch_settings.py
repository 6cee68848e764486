"""The settings of the late precision switch, and what of them a resumed run may change.

Not covered: whether the recipe quantises anything that could be switched; that takes torch to know, see
`late_switch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from megalowbit.errors import UserError, shown
from megalowbit.values import SettingsModel

KEY = "megalowbit.late_switch"


class LateSwitchSettings(SettingsModel):
    """`"late_switch"`: when the low-bit layers stop quantising, and in which of their products."""

    at: int | float = Field(
        description="optimizer steps before the switch, or their fraction of run.steps below 1"
    )
    scope: Literal["forward", "all"] = Field(
        default="forward", description="forward: gradients are quantised as before; all: nothing is quantised"
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
        """Optimizer steps before the switch; a fraction of the run is rounded, to one step at least.

        Args:
            total_steps: of the run.
        """
        return self.at if isinstance(self.at, int) else max(1, round(self.at * total_steps))


def check_late_switch(settings: LateSwitchSettings | None, total_steps: int) -> None:
    """Refuse a switch that would come after the last step.

    Raises:
        UserError: see above.
    """
    if settings is not None and settings.step(total_steps) >= total_steps:
        raise UserError(
            f"{KEY}.at = {settings.at} leaves no step after the switch: megalowbit.run.steps is "
            f"{total_steps}; lower at, or leave late_switch out"
        )


def check_resumed_switch(saved: Mapping[str, Any], current: Mapping[str, Any], *, step: int) -> None:
    """Refuse to continue a run whose trained steps would, by the present settings, have been others.

    A switch that lies ahead may be moved, added and left out; what a fraction means changes with run.steps.

    Args:
        saved: the resolved configuration in the checkpoint.
        current: the one of the run now.
        step: steps trained so far.

    Raises:
        UserError: see above.
    """
    before, now = _switch(saved), _switch(current)
    if before == now or all(each is None or each[0] >= step for each in (before, now)):
        return
    remedy = (
        "leave late_switch out"
        if before is None
        else f'resume with {KEY} = {{"at": {before[0]}, "scope": "{before[1]}"}}'
    )
    raise UserError(
        f"{KEY} would switch {_described(now)}, but of the {step} steps trained so far the run to be resumed "
        f"had switched {_described(before)}: {remedy}, or start a new run from its weights with "
        "megalowbit.model.checkpoint"
    )


def _switch(config: Mapping[str, Any]) -> tuple[int, str] | None:
    """Step and scope of a resolved configuration's switch."""
    block = config["megalowbit"]
    if block.get("late_switch") is None:  # also what earlier versions wrote
        return None
    settings = LateSwitchSettings.model_validate(block["late_switch"])
    return settings.step(block["run"]["steps"]), settings.scope


def _described(switch: tuple[int, str] | None) -> str:
    return "nothing" if switch is None else f"{shown(switch[1])} after step {switch[0]}"
