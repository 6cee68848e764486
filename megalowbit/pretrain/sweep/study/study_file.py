"""The file that describes a study: a grid of runs, which of them is the baseline, and what is compared.

Every combination of size, text, number of steps, seed, and recipe at each of its learning-rate factors is a
cell: one run. Keys and values of `set` are those of `--set`, with JSON values. Later ones win: those of the
study, of the size, of the recipe. Paths are relative to the file.

Imported without torch. Whether a recipe exists is checked when a cell's configuration is resolved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from megalowbit.errors import Problems, UserError, invalid_settings, shown, unknown_name
from megalowbit.json_text import read_json_object
from megalowbit.pretrain.sweep.instability.settings import InstabilitySettings
from megalowbit.values import SettingsModel, unit

LONGEST_NAME = 60  # several are joined to the name of a folder
NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
ALL_TEXTS = "all"  # in reports: the rows over all texts
# what the axes of the grid decide
OWN_KEYS = (
    "megalowbit.data.corpus",
    "megalowbit.data.text_field",
    "megalowbit.run.seed",
    "megalowbit.run.steps",
    "optimizer.params.lr",
)
MODEL_CONFIG = "megalowbit.model.config"  # reports hold the content of this file


class NamedEntry(SettingsModel):
    """An entry of a list in the study; its name is part of the names of cells."""

    name: str = Field(
        pattern=f"^{NAME}$", max_length=LONGEST_NAME, description="letters, digits and `. _ + -`"
    )


class Size(NamedEntry):
    """A model, or another one under stress."""

    set: dict[str, Any] = Field(default_factory=dict, description="overrides of the base configuration")
    stress_of: str | None = Field(
        default=None, description="name of the size that is stressed; its `set` comes before this one"
    )
    lr_factor: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="factor of the learning rate of all recipes"
    )
    steps: tuple[int, ...] = Field(
        default=(), description="lengths of runs, in place of the study's", json_schema_extra=unit("steps")
    )


class Text(NamedEntry):
    """A text to train on; part of it is held out."""

    source: Literal["stdlib", "docstrings", "file"] = Field(
        description="`stdlib`: the sources of Python's standard library. `docstrings`: the docstrings of "
        "installed packages. `file`: a text file, or a folder of them"
    )
    packages: tuple[str, ...] = Field(
        default=(), description="of the source `docstrings`: names as they are imported"
    )
    path: Path | None = Field(default=None, description="of the source `file`")


class RecipeEntry(NamedEntry):
    """A recipe, or any other change whose effect on the loss is compared with the baseline."""

    set: dict[str, Any] = Field(default_factory=dict, description="overrides of the base configuration")
    lr_factors: tuple[float, ...] = Field(
        default=(1.0,),
        min_length=1,
        description="each is a run of its own, with the learning rate times this number",
    )

    def label(self, factor: float) -> str:
        """The recipe's name, with the factor of the learning rate if it is another than 1."""
        return self.name if factor == 1 else f"{self.name}@lr{factor:g}"


class Replica(NamedEntry):
    """The same recipe with a change that should not matter: how far two equal runs drift apart."""

    of: str = Field(description="name of the recipe")
    lr_factor: float = Field(default=1.0, gt=0, description="factor of the learning rate, such as 1.000001")
    set: dict[str, Any] = Field(default_factory=dict, description="further overrides")


class StudySettings(SettingsModel):
    """A study."""

    base: Path = Field(description="DeepSpeed configuration of all cells")
    set: dict[str, Any] = Field(default_factory=dict, description="overrides for all cells")
    sizes: tuple[Size, ...] = Field(description="models")
    texts: tuple[Text, ...] = Field(description="texts")
    seeds: tuple[int, ...] = Field(description="of weights and of the order of the data")
    steps: tuple[int, ...] = Field(description="lengths of runs", json_schema_extra=unit("steps"))
    recipes: tuple[RecipeEntry, ...] = Field(description="recipes, the baseline included")
    baseline: str = Field(description="name of the recipe that the others are compared with")
    replicas: tuple[Replica, ...] = Field(default=(), description="runs that show the noise floor")
    baseline_forks: tuple[str, ...] = Field(
        default=(),
        description="recipes or replicas that leave the baseline's path early and are the baseline from then "
        "on; gaps are to the mean of the baseline and these",
    )
    window: int = Field(
        default=100,
        ge=1,
        description="number of steps in a mean of the training loss",
        json_schema_extra=unit("steps"),
    )
    marks: tuple[int, ...] = Field(
        default=(),
        description="steps at which such a mean ends; the end of a run is always one",
        json_schema_extra=unit("steps"),
    )
    heldout_bytes: int = Field(
        default=65_536,
        ge=2048,
        description="size of the text that is held out, in parts of 32 or more documents",
        json_schema_extra=unit("bytes"),
    )
    keep_weights: bool = Field(default=False, description="keep the trained weights of each cell, in `hf/`")
    instability: InstabilitySettings = Field(
        default=InstabilitySettings(), description="limits of the report on sizes with `stress_of`"
    )

    def size(self, name: str) -> Size:
        """The size with that name."""
        return next(each for each in self.sizes if each.name == name)

    def recipe(self, name: str) -> RecipeEntry:
        """The recipe with that name."""
        return next(each for each in self.recipes if each.name == name)


def read_study(path: Path) -> StudySettings:
    """Read and check a study's file.

    Raises:
        UserError: a line for each mistake.
    """
    return study_of(read_json_object(path, is_strict=True), str(path), path.parent)


def study_of(raw: dict[str, Any], where: str, folder: Path) -> StudySettings:
    """Check a study's content; its paths are relative to `folder`.

    Raises:
        UserError: a line for each mistake; each begins with `where`.
    """
    try:
        _check_keys_of_entries(raw)
    except UserError as error:
        raise _from(where, error) from None
    try:
        study = StudySettings.model_validate(raw)
    except ValidationError as error:
        raise _from(where, invalid_settings(error, "", StudySettings)) from None
    problems = Problems()
    for check in (_check_names, _check_numbers, _check_sizes, _check_recipes, _check_texts, _check_keys):
        with problems.collect():
            check(study)
    if problems:
        raise _from(where, problems.error())
    texts = tuple(
        text if text.path is None else text.model_copy(update={"path": (folder / text.path).resolve()})
        for text in study.texts
    )
    return study.model_copy(update={"base": (folder / study.base).resolve(), "texts": texts})


def _from(where: str, error: UserError) -> UserError:
    return UserError(f"{where}: {error}")


def _check_keys_of_entries(raw: dict[str, Any]) -> None:
    """Name unknown keys with the entry's name; pydantic would give its number."""
    problems = Problems()
    kinds: dict[str, type[NamedEntry]] = {
        "sizes": Size,
        "texts": Text,
        "recipes": RecipeEntry,
        "replicas": Replica,
    }
    for key, kind in kinds.items():
        entries = raw.get(key)
        for entry in entries if isinstance(entries, list) else []:
            unknown = (
                [each for each in entry if each not in kind.model_fields] if isinstance(entry, dict) else []
            )
            for each in unknown:
                problems.add(
                    unknown_name(f"key of {shown(entry.get('name'))} in {key}:", each, kind.model_fields)
                )
    problems.raise_any()


def _check_names(study: StudySettings) -> None:
    problems = Problems()
    for key in (
        "sizes",
        "texts",
        "seeds",
        "steps",
        "recipes",
    ):  # pydantic's check would follow other mistakes
        if not getattr(study, key):
            problems.add(UserError(f"{key} is empty: list at least one"))
    lists: dict[str, Iterable[NamedEntry]] = {
        "sizes": study.sizes,
        "texts": study.texts,
        "recipes and replicas": (*study.recipes, *study.replicas),
    }
    for kind, entries in lists.items():
        for name in _repeated(entry.name for entry in entries):
            problems.add(UserError(f"two {kind} are called {name!r}: rename one"))
    problems.raise_any()


def _check_numbers(study: StudySettings) -> None:
    problems = Problems()
    for key in ("seeds", "steps", "marks"):
        values = getattr(study, key)
        for value in _repeated(values):
            problems.add(UserError(f"{key} has {value} twice: remove one"))
        for value in values:
            if value < (0 if key == "seeds" else 1):
                problems.add(UserError(f"{key} has {value}: use positive numbers"))
    for recipe in study.recipes:
        for factor in recipe.lr_factors:
            if factor <= 0:
                problems.add(
                    UserError(f"recipe {recipe.name!r} has lr factor {factor}: use a number above 0")
                )
        for shown_factor in _repeated([f"{each:g}" for each in recipe.lr_factors]):
            problems.add(UserError(f"recipe {recipe.name!r} has lr factor {shown_factor} twice: remove one"))
    problems.raise_any()


def _check_sizes(study: StudySettings) -> None:
    problems = Problems()
    unstressed = [size.name for size in study.sizes if size.stress_of is None]
    for size in study.sizes:
        if size.stress_of is not None and size.stress_of not in unstressed:
            problems.add(unknown_name(f"unstressed size of {size.name!r}:", size.stress_of, unstressed))
        for value in size.steps:
            if value < 1:
                problems.add(UserError(f"size {size.name!r} has {value} steps: use positive numbers"))
        for value in _repeated(size.steps):
            problems.add(UserError(f"size {size.name!r} has {value} steps twice: remove one"))
        window, shortest = study.instability.window, min(size.steps or study.steps, default=1)
        if size.stress_of is not None and shortest < window:
            problems.add(
                UserError(
                    f"size {size.name!r} has {shortest} steps, too few to judge whether a run is broken: use "
                    f"at least {window}, or a smaller instability.window"
                )
            )
    problems.raise_any()


def _check_recipes(study: StudySettings) -> None:
    names = [recipe.name for recipe in study.recipes]
    problems = Problems()
    if study.baseline not in names:
        problems.add(unknown_name("baseline", study.baseline, names))
    elif 1.0 not in study.recipe(study.baseline).lr_factors:
        problems.add(UserError(f"baseline {study.baseline!r} needs lr factor 1: add it"))
    for replica in study.replicas:
        if replica.of not in names:
            problems.add(unknown_name(f"recipe of replica {replica.name!r}:", replica.of, names))
        elif 1.0 not in study.recipe(replica.of).lr_factors:
            problems.add(UserError(f"replica {replica.name!r} needs lr factor 1 of {replica.of!r}: add it"))
    others = [each.name for each in (*study.recipes, *study.replicas) if each.name != study.baseline]
    for fork in study.baseline_forks:
        if fork not in others:
            problems.add(unknown_name("baseline_forks:", fork, others))
    for replica in study.replicas:
        if replica.name in study.baseline_forks and replica.of != study.baseline:
            problems.add(
                UserError(f"baseline_forks: {replica.name!r} is a replica of {replica.of!r}: leave it out")
            )
    for fork in _repeated(study.baseline_forks):
        problems.add(UserError(f"baseline_forks has {fork!r} twice: remove one"))
    problems.raise_any()


def _check_texts(study: StudySettings) -> None:
    problems = Problems()
    for text in study.texts:
        if text.name == ALL_TEXTS:
            problems.add(UserError(f"a text is called {ALL_TEXTS!r}, as the rows over all texts: rename it"))
        for key, source in (("packages", "docstrings"), ("path", "file")):
            is_given, is_needed = bool(getattr(text, key)), text.source == source
            if is_given != is_needed:
                problem = "needs" if is_needed else "has no use for"
                problems.add(UserError(f"text {text.name!r} of source {text.source!r} {problem} {key!r}"))
    problems.raise_any()


def _check_keys(study: StudySettings) -> None:
    problems = Problems()
    entries = [
        ("the study", study.set),
        *((repr(each.name), each.set) for each in study.sizes),
        *((repr(each.name), each.set) for each in study.recipes),
        *((repr(each.name), each.set) for each in study.replicas),
    ]
    for where, values in entries:
        for key in values:
            if key in OWN_KEYS:
                problems.add(UserError(f"{key} in `set` of {where} is decided by the grid: remove it"))
            elif inner := [each for each in (*OWN_KEYS, MODEL_CONFIG) if each.startswith(f"{key}.")]:
                problems.add(
                    UserError(
                        f"{key} in `set` of {where} would replace {inner[0]} too: name the keys inside it "
                        "one by one"
                    )
                )
            elif not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", key):
                problems.add(UserError(f"{shown(key)} in `set` of {where} is not a dotted key"))
    problems.raise_any()


Value = TypeVar("Value")


def _repeated(values: Iterable[Value]) -> list[Value]:
    found = list(values)
    return [value for number, value in enumerate(found) if value in found[:number]]
