"""The base class of components: parts of a run with their own settings, state and metrics.

To add a component, write one file in this folder and add its class to `registry`. The class declares its
section of the configuration, which settings a resumed run may change, its state in checkpoints, its columns
in the metrics and its part of the summary. The loop calls the components' hooks in the order of `COMPONENTS`.
By default a hook does nothing. Hooks are called on every rank and must issue collectives in the same order on
all ranks. A component whose section is null or left out is not built.

Components are imported before torch, so that a configuration is checked within a second. They import heavy
modules inside the functions that use them. Components do not control the loop: stopping and rolling back are
the loop's decisions (`loop.roll_back`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field

from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.media import Medium
from megalowbit.telemetry.settings import TelemetrySettings
from megalowbit.values import SettingsModel, unit

if TYPE_CHECKING:
    import torch

    from megalowbit.data.loader import ShardedLoader
    from megalowbit.families.model_flops import ModelFlops
    from megalowbit.layers.recipe import Recipe

RUN_NAME = r"[\w.-]*[\w-][\w.-]*"  # dots alone would be another folder

Kind = TypeVar("Kind", bound="Component")


class RunSettings(SettingsModel):
    """How long to train, from which seed, and under which name."""

    steps: int = Field(ge=1, description="number of optimizer steps", json_schema_extra=unit("steps"))
    name: str | None = Field(
        default=None,
        pattern=f"^{RUN_NAME}$",
        description="name of the folder below `runs/`. `null`: the configuration file's name, without "
        "`.json`",
    )
    seed: int = Field(
        default=1234, ge=0, lt=2**63, description="seed of weights, data order, dropout and rounding"
    )
    deterministic: bool = Field(
        default=False,
        description="use deterministic algorithms only, so that a resumed run on GPUs has the same bits as "
        "an uninterrupted one; slower. On CPUs, runs are reproducible without it",
    )
    max_consecutive_skips: int = Field(
        default=50,
        ge=1,
        description="stop the run after this many skipped steps in a row (gradients not finite)",
        json_schema_extra=unit("steps"),
    )
    overflow_retries: int = Field(
        default=0,
        ge=0,
        description="how often to repeat a step whose gradients overflowed, with the same data and a lower "
        "loss scale each time. 0: the step is skipped",
        json_schema_extra=unit("attempts"),
    )


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The arguments from which a component is built.

    Attributes:
        engine: DeepSpeed's engine around the converted model.
        loader: the batches of this rank, tokenizer and text for validation.
        recipe: how the layers quantise.
        num_layers: low-bit layers of the full model; this process may hold a part of them.
        precision: of the model: `"fp16"`, `"bf16"` or `"fp32"`.
        flops: of one token of the full model.
        tokens_per_step: of one optimizer step, over all ranks.
        folder: the run folder.
        run: the `run` section.
        telemetry: the `telemetry` section.
        earlier: components built so far.
    """

    engine: Any
    loader: ShardedLoader
    recipe: Recipe
    num_layers: int
    precision: str
    flops: ModelFlops
    tokens_per_step: int
    folder: Path
    run: RunSettings
    telemetry: TelemetrySettings
    earlier: Sequence[Component] = ()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A component's part of the summary at the end of a run.

    Attributes:
        entries: keys and values for `summary.json`.
        row: a row of the printed summary: name, value, name, value.
        line: printed after the summary.
    """

    entries: Mapping[str, Any] = field(default_factory=dict)
    row: tuple[str, str, str, str] | None = None
    line: str | None = None


class Component:
    """A part of a run; subclasses override what they need. Checks raise `UserError`.

    Attributes:
        key: name of its section in the `"megalowbit"` block and of its state in a checkpoint's `progress`;
            empty: it has neither.
        settings_class: the `SettingsModel` of its section; None: it has no section and depends on other
            settings.
        description: describes the section in the reference of all keys.
        may_change: patterns of keys that a resumed run may change.
        records: names of the JSON lines files that it writes to the run folder; each line has a `step`.
    """

    key: ClassVar[str] = ""
    settings_class: ClassVar[Any] = None
    description: ClassVar[str] = ""
    may_change: ClassVar[tuple[str, ...]] = ()
    records: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check(cls, settings: Any, run: RunSettings, recipe: object) -> None:
        """Check the settings against those of the run and the unresolved recipe, without importing torch."""

    @classmethod
    def check_recipe(cls, settings: Any, recipe: Recipe) -> None:
        """Check the settings against the resolved recipe; the section's key is prepended to messages."""

    @classmethod
    def check_resumed(cls, saved: Mapping[str, Any], current: Mapping[str, Any], *, step: int) -> None:
        """Reject changes that `may_change` allows but that conflict with the steps trained so far.

        Args:
            saved: the resolved configuration in the checkpoint.
            current: the resolved configuration of the resumed run.
            step: steps trained so far.
        """

    @classmethod
    def build(cls, settings: Any, parts: RunParts) -> Component | None:
        """Build the component; None if it has nothing to do in this run."""
        return None

    def startup_line(self) -> str | None:
        """A line for the start of the run; its label takes the first ten characters."""
        return None

    def before_step(self, step: int) -> str | None:
        """Called before each optimizer step, after `step` steps. Returns a line to print."""
        return None

    def read_batch(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Called with each micro-batch of this rank when it is read, on the CPU; not again for a retry."""

    def begin_attempt(self) -> None:
        """Called before the first micro-batch of each attempt at a step."""

    def end_step(self) -> None:
        """Called after the last attempt at a step."""

    def facts(self, known: Facts) -> Facts:
        """Columns of the metrics for this step; `known` has the loop's columns, such as the loss."""
        return {}

    def evaluate(self, step: int, progress: Callable[[], None]) -> Facts:
        """Columns for `step` (counted from 1) that need forwards of the model; called after `facts`.

        `progress` must be called every few seconds. `--benchmark` does not call this hook.
        """
        return {}

    def after_step(self, step: int, facts: Facts) -> Iterable[str]:
        """Called after the metrics of `step` (counted from 1) are recorded. Returns lines to print."""
        return ()

    def media(self) -> Sequence[Medium]:
        """Histograms and texts of the step; called after `after_step`, on the main process only."""
        return ()

    def stop(self, step: int) -> str | None:
        """Called after `step` if the run is stopped there on request. Returns a line to print."""
        return None

    def summary(self) -> Summary:
        """Its part of the summary; every rank calls it."""
        return Summary()

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint, stored under `key`; every rank calls it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        """Restore the state from a checkpoint: after a resume, or in a running process after a rollback.

        Args:
            state: the value that `state_dict` returned; None: the checkpoint has none.
            step: steps trained when the checkpoint was saved.
            source: path of the checkpoint, for messages.

        Raises:
            UserError: the component cannot continue from `state`.
        """

    def named_checkpoints(self) -> Mapping[str, int | None]:
        """Steps whose checkpoints are saved at once and kept, by the name of a file beside them.

        The file names the step. None: no checkpoint has this name.
        """
        return {}

    def after_load(self, saved_steps: Collection[int]) -> None:
        """Called after `load_state_dict` with the steps of all complete checkpoints."""

    def open_records(self, folder: Path, resume_step: int | None) -> None:
        """Open `records` on the main process and remove lines after `resume_step`; None: a new run."""

    def close_records(self) -> None:
        """Close the records, if they are open."""


def find(components: Iterable[Component], kind: type[Kind]) -> Kind | None:
    """The component of that class; None: the run has none."""
    return next((each for each in components if isinstance(each, kind)), None)
