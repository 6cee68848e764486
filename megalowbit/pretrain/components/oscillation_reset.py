"""OsciReset: measures weights that oscillate between quantised numbers, and moves masters off the border.

TetraJet-v2 (arXiv:2510.27527) does this in the later part of training: every `period` steps, the paths of
weights are measured for `window` steps, and masters whose ratio reaches `threshold` are reset,
unless `reset` is off. `engine/parameters/oscillation.py` measures and resets.

A window is not part of a checkpoint. If a run is resumed or rolled back inside of a window, that window is
dropped, so such a run does not repeat the bits of one that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from megalowbit.errors import UserError
from megalowbit.pretrain.components.base import Component, RunParts, RunSettings, Summary, find
from megalowbit.pretrain.components.speculation import Speculation
from megalowbit.telemetry.facts import Facts
from megalowbit.values import SettingsModel, unit

if TYPE_CHECKING:
    from megalowbit.engine.parameters.oscillation import Oscillation, OscillationWindow
    from megalowbit.layers.recipe import Recipe

KEY = "megalowbit.oscillation_reset"


class OscillationResetSettings(SettingsModel):
    """When weights are measured, and from which ratio on they are reset."""

    start: int | float = Field(
        default=0.7,
        description="optimizer steps before the first window (≥ 0), or a fraction of `run.steps` (between 0 "
        "and 1)",
        json_schema_extra=unit("steps"),
    )
    period: int = Field(
        default=400,
        ge=1,
        description="steps from the beginning of a window to that of the next",
        json_schema_extra=unit("steps"),
    )
    window: int = Field(
        default=50,
        ge=1,
        description="steps whose paths are measured, at most `period`. At ZeRO stages 1 to 3, each of them "
        "gathers the masters. A window takes 16 bytes for each low-bit weight of a rank",
        json_schema_extra=unit("steps"),
    )
    threshold: float = Field(
        default=8.0,
        gt=0,
        allow_inf_nan=False,
        description="a master is set to the middle of its cell if the quantised weight has moved at least "
        "this many times as far as the master",
    )
    reset: bool = Field(
        default=True,
        description="false: only measure, and record the share of the weights that reach `threshold`",
    )

    @field_validator("start", mode="before")
    @classmethod
    def _is_a_step_or_a_fraction(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        if isinstance(value, float) and 0 < value < 1:
            return value
        raise ValueError("expected a whole number of steps ≥ 0, or a fraction of run.steps between 0 and 1")

    def first(self, total_steps: int) -> int:
        """Optimizer steps before the first window."""
        return self.start if isinstance(self.start, int) else round(self.start * total_steps)


class OscillationReset(Component):
    """Opens a window every `period` steps, and resets the weights at its end.

    Args:
        settings: when, and which.
        module: the converted model, in an engine.
        total_steps: optimizer steps of the run.
    """

    key = "oscillation_reset"
    settings_class = OscillationResetSettings
    description = "measure weights that oscillate between quantised numbers, and reset them; off unless set"

    def __init__(self, settings: OscillationResetSettings, module: Any, *, total_steps: int) -> None:
        self._settings, self._module = settings, module
        self._first, self._total_steps = settings.first(total_steps), total_steps
        self._window: OscillationWindow | None = None
        self._found: Oscillation | None = None  # of the window that ended before the current step
        self._is_over = False  # no layer quantises its weight any more, after a late switch
        self._shares: list[float] = []  # at the threshold in each window since the start of the process

    @classmethod
    def build(cls, settings: OscillationResetSettings, parts: RunParts) -> OscillationReset:
        if find(parts.earlier, Speculation) is not None:
            raise UserError(
                f"{KEY} needs weights of one format, and megalowbit.speculation changes it during the run: "
                "leave one of the two out"
            )
        return cls(settings, parts.engine.module, total_steps=parts.run.steps)

    @classmethod
    def check(cls, settings: OscillationResetSettings, run: RunSettings, recipe: object) -> None:
        """Reject windows that overlap, and a run that ends before the first window does."""
        if settings.window > settings.period:
            raise UserError(
                f"{KEY}.window = {settings.window} is above {KEY}.period = {settings.period}: lower window"
            )
        end = settings.first(run.steps) + settings.window
        if end >= run.steps:
            raise UserError(
                f"{KEY} would end its first window after step {end}, but megalowbit.run.steps is "
                f"{run.steps}: lower start or window, or leave oscillation_reset out"
            )

    @classmethod
    def check_recipe(cls, settings: OscillationResetSettings, recipe: Recipe) -> None:
        """Reject a recipe in which weights have no fixed cells."""
        from megalowbit.engine.parameters.oscillation import check_measurable

        check_measurable(recipe)

    def startup_line(self) -> str:
        settings = self._settings
        return (
            f"weights   measured for {settings.window} steps every {settings.period} from step {self._first} "
            f"on; {'reset' if settings.reset else 'counted'} if they oscillate at a ratio of "
            f"{settings.threshold:g} or more"
        )

    def before_step(self, step: int) -> str | None:
        """Measure the last step, if there is a window; end or begin one. Collective."""
        from megalowbit.engine.parameters.oscillation import OscillationWindow

        self._found = None
        since = (step - self._first) % self._settings.period if step >= self._first else -1
        if self._window is not None:
            self._window.measure()
            if since == self._settings.window % self._settings.period and not self._window.is_empty():
                end = self._window.reset if self._settings.reset else self._window.found
                self._found, self._window = end(self._settings.threshold), None
                self._shares.append(self._found.share)
        if since == 0 and step + self._settings.window < self._total_steps and not self._is_over:
            self._window = OscillationWindow(self._module)
        if self._window is not None and self._window.is_empty():
            self._window, self._is_over = None, True
            return "oscillation is no longer measured: no layer quantises its weight in the forward any more"
        if self._found is None:
            return None
        return (
            f"oscillation in {self._settings.window} steps to {step}: quantised weights moved "
            f"{self._found.ratio:.3g} times as far as masters; {self._found.share:.3%} of the weights "
            f"{'reset' if self._settings.reset else f'at a ratio of {self._settings.threshold:g} or more'}"
        )

    def facts(self, known: Facts) -> Facts:
        """Of the window that ended before the step: ratio of all paths, share of weights that oscillate."""
        if self._found is None:
            return {}
        found: Facts = {"oscillation/ratio": self._found.ratio, "oscillation/share": self._found.share}
        return {**found, "oscillation/reset_share": self._found.share} if self._settings.reset else found

    def summary(self) -> Summary:
        """Windows of this process, and the mean share of the weights that oscillate."""
        if not self._shares:
            return Summary()
        mean = sum(self._shares) / len(self._shares)
        return Summary(entries={"oscillation_reset": {"windows": len(self._shares), "mean_share": mean}})

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        """Drop an open window, whose paths belong to steps that are trained again; a switch may be undone."""
        self._window, self._is_over = None, False
