"""What a component of a run is: a part that a configuration switches on, with settings, state and facts.

A component is one file in this folder and one class in `registry`. From what that declares follow its section
of the configuration, what of it a resumed run may change, its place in checkpoints, its columns in the
metrics and its part of the summary; the loop calls its hooks, in the order of `COMPONENTS`. Each hook does
nothing unless a component says otherwise. Hooks are called on every rank, and must leave collectives in the
same order on all. A component whose section is null or left out is neither built nor asked.

Components are imported before torch, which checks a configuration in a second: what is heavy, they import
where they use it. What decides where the run goes on (stop, roll back) is the loop's; see `roll_back`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field

from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.settings import TelemetrySettings
from megalowbit.values import SettingsModel

if TYPE_CHECKING:
    from megalowbit.layers.recipe import Recipe

RUN_NAME = r"[\w.-]*[\w-][\w.-]*"  # dots alone would be another folder

Kind = TypeVar("Kind", bound="Component")


class RunSettings(SettingsModel):
    """`"run"`: how long, from which seed, under which name."""

    steps: int = Field(ge=1, description="number of optimizer steps")
    name: str | None = Field(default=None, pattern=f"^{RUN_NAME}$", description="folder below runs/")
    seed: int = Field(default=1234, ge=0, lt=2**63, description="of weights, data order, dropout, rounding")
    max_consecutive_skips: int = Field(
        default=50, ge=1, description="stop after so many steps in a row with non-finite gradients"
    )
    overflow_retries: int = Field(
        default=0,
        ge=0,
        description="how often a step whose gradients overflowed is done again, at a lower loss scale each "
        "time, with the same data; 0: it is skipped",
    )


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What a component is built from.

    Attributes:
        engine: DeepSpeed's engine around the converted model.
        recipe: how the layers quantise.
        num_layers: low-bit layers of the whole model, of which this process may hold a part.
        run: the section of that name.
        telemetry: the section of that name.
        earlier: components built so far.
    """

    engine: Any
    recipe: Recipe
    num_layers: int
    run: RunSettings
    telemetry: TelemetrySettings
    earlier: Sequence[Component] = ()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a component adds to the end of a run.

    Attributes:
        entries: of `summary.json`, by key.
        row: of the screen: two names, each followed by its value.
        line: printed after the summary.
    """

    entries: Mapping[str, Any] = field(default_factory=dict)
    row: tuple[str, str, str, str] | None = None
    line: str | None = None


class Component:
    """A part of a run; subclasses override what they need. Checks raise `UserError`.

    Attributes:
        key: of its section of the `"megalowbit"` block, and of its state in a checkpoint's `progress`; empty:
            it has neither.
        settings_class: of its section, a `SettingsModel`; None: it has none and follows from other settings.
        may_change: patterns of keys that a resumed run may change.
        records: names of files that it writes into the run's folder, JSON lines with a `step`.
    """

    key: ClassVar[str] = ""
    settings_class: ClassVar[Any] = None
    may_change: ClassVar[tuple[str, ...]] = ()
    records: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check(cls, settings: Any, run: RunSettings, recipe: object) -> None:
        """Refuse settings that do not go with the run's, or with the recipe as the block has it; no torch."""

    @classmethod
    def check_recipe(cls, settings: Any, recipe: Recipe) -> None:
        """Refuse settings that a valid recipe does not allow; messages get the section's key in front."""

    @classmethod
    def check_resumed(cls, saved: Mapping[str, Any], current: Mapping[str, Any], *, step: int) -> None:
        """Refuse what `may_change` lets pass and the steps trained so far do not.

        Args:
            saved: the resolved configuration in the checkpoint.
            current: the one of the run now.
            step: steps trained so far.
        """

    @classmethod
    def build(cls, settings: Any, parts: RunParts) -> Component | None:
        """The component of a run; None where there is nothing for it to do."""
        return None

    def startup_line(self) -> str | None:
        """A line for the run's opening, its name in ten characters first."""
        return None

    def before_step(self, step: int) -> str | None:
        """Act between two optimizer steps; `step` are trained so far. Returns what to print."""
        return None

    def begin_attempt(self) -> None:
        """Called before the first micro-batch of a step, and once more for each time it is repeated."""

    def end_step(self) -> None:
        """Called after a step's last try, before its loss is reduced over the ranks."""

    def facts(self, known: Facts) -> Facts:
        """Columns of the metrics for the step just taken; `known` has those of the loop, such as the loss."""
        return {}

    def after_step(self, step: int, facts: Facts) -> Iterable[str]:
        """Called when a step's facts are recorded; its number counts from 1. Returns what to print."""
        return ()

    def summary(self) -> Summary:
        """What the end of the run says of it; every rank calls it."""
        return Summary()

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint, under `key`; every rank calls it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        """Continue from a checkpoint, also with a state from before this process went on.

        Args:
            state: as `state_dict` has returned it; None: the run was saved without.
            step: steps trained then.
            source: of the checkpoint, for messages.

        Raises:
            UserError: it cannot continue from `state`.
        """

    def open_records(self, folder: Path, resume_step: int | None) -> None:
        """Open `records`, on the main process; lines after `resume_step` go, None: there are none."""

    def close_records(self) -> None:
        """Close them, if they are open."""


def find(components: Iterable[Component], kind: type[Kind]) -> Kind | None:
    """The component of that class; None: the run has none."""
    return next((each for each in components if isinstance(each, kind)), None)
