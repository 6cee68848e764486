"""The configuration of a run: one DeepSpeed JSON file with a strict `"megalowbit"` block.

DeepSpeed's keys stay where DeepSpeed documents them; `config/deepspeed_json.py` reads those. Each section of
the `"megalowbit"` block is a frozen model, defined next to the code that uses it (data, hf, telemetry,
components). This module combines the sections, applies `--set key=value` and makes relative paths absolute:
paths in the file are relative to the file's folder, paths given with `--set` to the working directory.

A typo is reported within a second, before heavy imports, unless the recipe's mistakes are to be reported as
well. Not covered: checks that need torch or DeepSpeed, which are in `checks.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, create_model

from megalowbit.config.batch_size import data_size_of
from megalowbit.config.deepspeed_json import (
    DeepSpeedConfigParts,
    load_json,
    read_deepspeed_config,
)
from megalowbit.config.engine_settings import EngineSettings
from megalowbit.config.pipeline import check_pipeline, stages_of
from megalowbit.config.zero import auto_sizes
from megalowbit.data.settings import DataSettings, is_token_prefix, names_files
from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.errors import Problems, UserError, invalid_settings, shown
from megalowbit.hf.settings import ModelSettings
from megalowbit.json_text import NotJsonError, parse_json
from megalowbit.layers.settings import DEFAULT_RECIPE
from megalowbit.pretrain.components.base import RUN_NAME, Component, RunSettings
from megalowbit.pretrain.components.media.samples import SamplesSettings, check_samples
from megalowbit.pretrain.components.registry import ALWAYS_ON, COMPONENTS, OPTIONAL
from megalowbit.pretrain.components.validation import ValidationSettings, check_validation
from megalowbit.telemetry.settings import (
    TelemetrySettings,
    TensorBoardBlock,
    TrackioSettings,
    WandbSettings,
)
from megalowbit.values import BLOCK, LARGEST, SettingsModel, unit

ENGINE_KEYS = tuple(EngineSettings.model_fields)
FILE_KEYS = ("model.config", "model.checkpoint", "data.cache_dir")
NAME_OR_FILE_KEYS = ("data.corpus", "data.tokenizer", "data.validation.corpus")
NOT_PATHS = {"stdlib", "blend", "byte", "bpe", "none"}
MOST_PROCESSES = 2**20  # estimates list them
LARGE_VOCABULARY = 2**16  # from here on, the loss is computed in chunks by default

Settings = TypeVar("Settings", bound=BaseModel)


class CheckpointSettings(SettingsModel):
    """When to save, how many checkpoints to keep, and what to export at the end."""

    every: int = Field(
        default=0,
        ge=0,
        description="interval between checkpoints. 0: only at the end",
        json_schema_extra=unit("steps"),
    )
    keep: int | None = Field(
        default=3, ge=1, description="how many of the newest checkpoints to keep. `null`: all of them"
    )
    export_hf: bool = Field(
        default=True, description="write the final model to `hf/`, in Hugging Face's format"
    )


class PretrainSettings(SettingsModel):
    """The sections of the `"megalowbit"` block that the pretraining loop reads; the engine reads the others.

    `SETTINGS_MODEL` adds the sections of the components.
    """

    model: ModelSettings = Field(description="the model: an architecture, or weights to start from")
    data: DataSettings = Field(description="the corpus, the tokenizer and the sequence length")
    run: RunSettings = Field(description="the number of steps, the seed and the name of the run")
    checkpoint: CheckpointSettings = Field(
        default=CheckpointSettings(), description="when to save, and what to keep"
    )
    telemetry: TelemetrySettings = Field(
        default=TelemetrySettings(), description="what a run records, and how often"
    )
    trackio: TrackioSettings = Field(
        default=TrackioSettings(), description="whether trackio records the run, Hugging Face's local tracker"
    )

    def of(self, kind: type[Settings]) -> Settings | None:
        """The section with settings of that class, or None if it is off."""
        return next((value for _, value in self if isinstance(value, kind)), None)

    def components(self) -> Iterator[tuple[type[Component], Any]]:
        """The enabled components, each with its settings; None if it has no section."""
        for kind in COMPONENTS:
            settings = self.of(kind.settings_class) if kind.settings_class else None
            if settings is not None or kind.settings_class is None:
                yield kind, settings


_SECTIONS: dict[str, Any] = {  # name: type and default
    **{
        kind.key: (
            kind.settings_class,
            Field(default_factory=kind.settings_class, description=kind.description),
        )
        for kind in ALWAYS_ON
    },
    **{
        kind.key: (kind.settings_class | None, Field(default=None, description=kind.description))
        for kind in OPTIONAL
    },
}
SETTINGS_MODEL = create_model(
    "PretrainSettings", __base__=PretrainSettings, __doc__=PretrainSettings.__doc__, **_SECTIONS
)


class Monitors(SettingsModel):
    """DeepSpeed's top-level monitor blocks that the training loop reads; DeepSpeed does not get them."""

    tensorboard: TensorBoardBlock = Field(default=TensorBoardBlock(), description="TensorBoard event files")
    wandb: WandbSettings = Field(default=WandbSettings(), description="Weights & Biases")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A validated configuration with every default and every `"auto"` filled in.

    Attributes:
        source: the file that was read.
        parts: DeepSpeed's configuration, and the engine's settings.
        settings: the loop's settings.
        monitors: the sinks' settings.
        grid: the process grid, as seen from rank 0.
        is_sized_to_fit: the number of processes was not given, and is the smallest that fits.
    """

    source: Path
    parts: DeepSpeedConfigParts
    settings: PretrainSettings
    monitors: Monitors
    grid: ProcessGrid
    is_sized_to_fit: bool = False

    @property
    def recipe(self) -> str | dict[str, Any]:
        """The recipe, as a name or a block."""
        recipe = self.parts.settings.recipe
        return DEFAULT_RECIPE if recipe is None else recipe

    def chunks_loss(self, vocab_size: int) -> bool:
        """Whether the loss of a model with this vocabulary is computed in chunks."""
        chosen = self.parts.settings.chunked_cross_entropy
        is_default = vocab_size >= LARGE_VOCABULARY and self.grid.pipeline_size == 1
        return is_default if chosen is None else chosen

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration as one JSON object, which can be used as a configuration file."""
        block = {
            **self.settings.model_dump(mode="json"),
            **self.parts.settings.model_dump(mode="json"),
        }
        monitors = self.monitors.model_dump(mode="json", exclude_defaults=True)
        return {**self.parts.deepspeed, **monitors, BLOCK: block}


def load_config(
    path: Path, overrides: list[str], *, world_size: int | None, has_model: bool = True
) -> PretrainConfig:
    """Read, override, validate and resolve a configuration.

    Args:
        path: a DeepSpeed JSON file with a `"megalowbit"` block.
        overrides: `"dotted.key=value"`; values are JSON, or else plain strings.
        world_size: number of processes; processes that share one model count as one in batch sizes. None: not
            known yet, for example with `--prepare-data`; the smallest number that fits is used.
        has_model: whether the model's files can be read on this machine; if not, `"auto"` values that
            depend on the model become 1.

    Raises:
        UserError: the file, keys, values or their combination are invalid; a line for each mistake.
    """
    raw = _read_overridden(path, overrides)
    block = raw[BLOCK]
    if block.get("recipe") is None:  # the resolved configuration shows the default in place of null
        block["recipe"] = DEFAULT_RECIPE  # in the loop only: an engine without it converts no layers
    problems = Problems()
    settings, grid, hidden_size, parts = None, None, None, None
    with problems.collect():
        blocks = {name: raw.pop(name) for name in Monitors.model_fields if name in raw}
        monitors = _validate(Monitors, blocks, "")
    with problems.collect():
        settings = _validate_block(block, path.stem)
    with problems.collect():
        grid = _grid_of(raw, world_size)
    with problems.collect():
        hidden_size = _hidden_size(raw, settings) if has_model else 1
    with problems.collect():
        parts = read_deepspeed_config(
            raw,
            world_size=data_size_of(raw) if grid is None else grid.data_size,
            total_steps=LARGEST if settings is None else settings.run.steps,
            hidden_size=hidden_size,
        )
    if problems:
        _add_mistakes_in_recipe(block["recipe"], problems)
    if settings is not None:
        _check_components(settings, block["recipe"], problems)
        if parts is not None:
            _check_combinations(settings, parts, problems)
    problems.raise_any()
    assert settings is not None  # a missing part has been reported
    assert parts is not None
    assert grid is not None
    return PretrainConfig(
        source=path,
        parts=parts,
        settings=settings,
        monitors=monitors,
        grid=grid,
        is_sized_to_fit=world_size is None,
    )


def _grid_of(raw: Mapping[str, Any], world_size: int | None) -> ProcessGrid:
    if world_size is None:
        return ProcessGrid.smallest(raw, data_size_of(raw))
    if world_size > MOST_PROCESSES:
        raise UserError(f"{world_size:,} processes are not supported: at most {MOST_PROCESSES:,}")
    return ProcessGrid.from_config(raw, 0, world_size)


def _check_components(settings: PretrainSettings, recipe: object, problems: Problems) -> None:
    """Add settings of components that cannot be combined with the run or the recipe."""
    for component, of_component in settings.components():
        with problems.collect():
            component.check(of_component, settings.run, recipe)


def _check_combinations(settings: PretrainSettings, parts: DeepSpeedConfigParts, problems: Problems) -> None:
    """Add values that are valid on their own but cannot be combined."""
    with problems.collect():
        check_pipeline(parts.deepspeed, parts.settings, stages_of(parts.deepspeed))
    with problems.collect():
        check_retries(settings.run.overflow_retries, parts.settings)
    with problems.collect():
        check_samples(
            settings.of(SamplesSettings),
            tokenizer=settings.data.tokenizer,
            stages=stages_of(parts.deepspeed),
        )
    validation = settings.of(ValidationSettings)
    with problems.collect():
        check_validation(
            validation or ValidationSettings(),
            has_text=settings.data.validation is not None,
            sequence_length=settings.data.sequence_length,
            micro_batch_size=parts.deepspeed["train_micro_batch_size_per_gpu"],
            stages=stages_of(parts.deepspeed),
        )


def _read_overridden(path: Path, overrides: list[str]) -> dict[str, Any]:
    """The content of the file with `overrides` applied and paths made absolute, otherwise unchecked."""
    raw = load_json(path)
    problems = Problems()
    with problems.collect():
        _make_paths_absolute(_block(raw, path), path.parent)
    for override in overrides:
        with problems.collect():
            _apply_override(raw, override)
    with problems.collect():
        _make_paths_absolute(_block(raw, path), working_folder())
    problems.raise_any()
    return raw


def working_folder() -> Path:
    """The working directory.

    Raises:
        UserError: it has been removed.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise UserError(
            f"the working directory cannot be used ({error.strerror}): change to one that exists"
        ) from None


def _hidden_size(raw: Mapping[str, Any], settings: PretrainSettings | None) -> int | None:
    """The model's hidden size if an `"auto"` value needs it; otherwise None, without importing torch."""
    if settings is None or not auto_sizes(raw):
        return None
    from megalowbit.hf.checkpoint import read_config

    size: int = read_config(settings.model).hidden_size
    return size


def _add_mistakes_in_recipe(recipe: object, problems: Problems) -> None:
    """Add the recipe's mistakes to other mistakes; if there are no others, `check_config` finds them."""
    if recipe == DEFAULT_RECIPE:
        return
    try:
        from megalowbit.layers.recipe import recipe as recipe_of
    except ModuleNotFoundError:  # no torch on a login node: only the job's container image may have it
        return
    if isinstance(recipe, str | Mapping):  # other types have been reported already
        with problems.collect():
            recipe_of(recipe)


def _block(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    if BLOCK not in raw:
        raise UserError(f'{path} has no "{BLOCK}" object: add one with at least model, data and run')
    block = raw[BLOCK]
    if not isinstance(block, dict):
        raise UserError(f'"{BLOCK}" = {shown(block)} must be an object with at least model, data and run')
    return block


def _validate_block(block: dict[str, Any], stem: str) -> PretrainSettings:
    ours = {key: value for key, value in block.items() if key not in ENGINE_KEYS}
    settings = _validate(SETTINGS_MODEL, ours, BLOCK, also=ENGINE_KEYS)
    if settings.run.name is None and re.fullmatch(RUN_NAME, stem):
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"name": stem})})
    if "seed" not in settings.data.model_fields_set:
        data = settings.data.model_copy(update={"seed": settings.run.seed})
        settings = settings.model_copy(update={"data": data})
    return settings


def check_retries(overflow_retries: int, engine: EngineSettings) -> None:
    """Reject retries if there is no loss scale to lower."""
    if overflow_retries and engine.grad_scaler.type in {"none", "constant"}:
        raise UserError(
            f"{BLOCK}.run.overflow_retries = {overflow_retries} needs a loss scale that can be lowered "
            f"(precision {engine.precision}, grad_scaler.type {engine.grad_scaler.type!r}): set it to 0, or "
            "use fp16 with a dynamic scaler"
        )


def _validate(model: type[Settings], values: Any, where: str, *, also: tuple[str, ...] = ()) -> Settings:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid_settings(error, where, model, also=also) from None


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"--set {shown(override)} is not key=value: write for example --set {BLOCK}.run.steps=100"
        )
    try:
        value = parse_json(text, f"--set {shown(override)}", is_strict=True)
    except NotJsonError:
        value = text
    *parents, last = key.split(".")
    node = raw
    for depth, parent in enumerate(parents):
        if node.get(parent) is None:  # missing, or null as in a resolved configuration
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            where = ".".join(parents[: depth + 1])
            raise UserError(
                f"--set {shown(override)}: {where} is {shown(node)}, not an object that can contain {last!r}"
            )
    node[last] = value


def _make_paths_absolute(block: dict[str, Any], base: Path) -> None:
    """Resolve the paths in `block` relative to `base`, in place; names that are not paths are kept."""
    for dotted in (*FILE_KEYS, *NAME_OR_FILE_KEYS, *_keys_of_sources(block)):
        *sections, key = dotted.split(".")
        holder: Any = block
        for section in sections:
            holder = holder.get(section) if isinstance(holder, dict) else None
        if not isinstance(holder, dict):
            continue
        value = holder.get(key)
        if not isinstance(value, str) or value in NOT_PATHS:
            continue
        if not value:  # it would resolve to the folder itself
            raise UserError(f"{BLOCK}.{dotted} = '' is empty: name a file, or leave it out")
        try:
            holder[key] = _absolute(value, base, is_path=dotted in FILE_KEYS)
        # too long; a loop of links or no home directory; a null byte
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"{BLOCK}.{dotted} = {shown(value)} is not a valid path ({reason}): name another"
            ) from None


def _keys_of_sources(block: Mapping[str, Any]) -> list[str]:
    data = block.get("data")
    sources = data.get("sources") if isinstance(data, dict) else None
    return [f"data.sources.{name}.corpus" for name in sources] if isinstance(sources, dict) else []


def _absolute(value: str, base: Path, *, is_path: bool) -> str:
    path = base / Path(value).expanduser()
    # A corpus may also be the name of a data set: only a value that exists or looks like a file is a path.
    looks_like_file = is_path or names_files(value) or Path(value).suffix == ".json"
    # a prefix of files and a glob do not exist themselves
    if path.exists() or is_token_prefix(path) or looks_like_file or value.startswith((".", "~")):
        return str(path.resolve())
    return value
