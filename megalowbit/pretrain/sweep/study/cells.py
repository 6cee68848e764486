"""Cells of a study: their names, settings, folders and results.

A cell is one run of launch/pretrain.py. Its folder `cells/NAME` is the run folder, with two more files:
`cell.json`, written before the run starts, has all settings on which the result depends; `result.json`,
written atomically at the end, marks the cell as finished. Texts, model configurations and recipes count by
their contents, weights to start from and folders of tokenizers by their paths and their contents.
"""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megalowbit.durable_files import atomic_file, open_regular
from megalowbit.errors import TransientError, UserError, shown, unknown_name
from megalowbit.json_text import is_finite_number, read_json_object
from megalowbit.pretrain.checks import load_checked_config
from megalowbit.pretrain.config import PretrainConfig
from megalowbit.pretrain.resume import with_current_names
from megalowbit.pretrain.sweep.contents import MISSING, contents_of, differences, plain, with_default_fields
from megalowbit.pretrain.sweep.runs import Run
from megalowbit.pretrain.sweep.study.results import Result, block_of, result_of
from megalowbit.pretrain.sweep.study.study_file import RecipeEntry, Replica, Size, StudySettings
from megalowbit.pretrain.sweep.study.texts import HELD_OUT, TRAIN, TextFacts

CELLS, TEXTS, LOGS, LOCKS = "cells", "texts", "logs", "locks"
SETTINGS, RESULT = "cell.json", "result.json"
RUN_ELSEWHERE = "is run by another process"  # in the error of a cell whose lock is held
# No event files and no counts, which take time. A study may set them again.
LEAN = {"megalowbit.telemetry.tensorboard": False, "megalowbit.telemetry.overflow": False}
# Schedulers with learning rates of their own; all others multiply the optimizer's.
ABSOLUTE_SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest", "OneCycleLR")
REMOVED_PATHS = (("model", "config"), ("data", "corpus"), ("data", "cache_dir"))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a study, finished or not.

    Attributes:
        study: the study.
        folder: folder of the study.
        size: the model.
        text: name of the text.
        steps: optimizer steps.
        seed: seed of weights and data.
        entry: the recipe or replica.
        lr_factor: factor of the learning rate.
        program: path of launch/pretrain.py.
    """

    study: StudySettings
    folder: Path
    size: Size
    text: str
    steps: int
    seed: int
    entry: RecipeEntry | Replica
    lr_factor: float
    program: Path

    @property
    def label(self) -> str:
        """Name of the recipe or replica, with the factor of the learning rate if a recipe has another."""
        return self.entry.name if isinstance(self.entry, Replica) else self.entry.label(self.lr_factor)

    @property
    def name(self) -> str:
        """Unique within the study; also the name of the folder."""
        return f"{self.size.name},{self.text},{self.steps},{self.label},{self.seed}"

    def axis(self, name: str) -> str:
        """Its place on an axis: `size`, `text`, `steps`, `seed` or `recipe`."""
        others = {"size": self.size.name, "recipe": self.label}
        return others[name] if name in others else str(getattr(self, name))

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder / CELLS / self.name

    @property
    def text_folder(self) -> Path:
        """Folder of the text's files."""
        return self.folder / TEXTS / self.text

    @property
    def heldout(self) -> Path:
        """The held-out text."""
        return self.text_folder / HELD_OUT

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        """Arguments of `--set`."""
        repeated = self.study.recipe(self.entry.of).set if isinstance(self.entry, Replica) else {}
        own = {
            "megalowbit.run.steps": self.steps,
            "megalowbit.run.seed": self.seed,
            "megalowbit.data.corpus": str(self.text_folder / TRAIN),
            "megalowbit.data.text_field": "text",
            "megalowbit.checkpoint.export_hf": True,  # the held-out loss is that of the exported weights
        }
        stressed = {} if self.size.stress_of is None else self.study.size(self.size.stress_of).set
        values: dict[str, Any] = {}
        for changes in (LEAN, self.study.set, stressed, self.size.set, repeated, self.entry.set, own):
            for key, value in changes.items():
                values.pop(key, None)  # a later key may contain an earlier one, so the order counts
                values[key] = value
        given = tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
        factor = self.lr_factor * self.size.lr_factor
        if factor == 1:
            return given
        key, plain = "optimizer.params.lr", self._load(given).parts.deepspeed
        lr = plain.get("optimizer", {}).get("params", {}).get("lr")
        if not is_finite_number(lr):
            raise UserError(f"{self.name}: lr_factor needs a number as {key}, not {shown(lr)}")
        found = (*given, f"{key}={json.dumps(lr * factor)}")
        scheduler = plain.get("scheduler")
        is_absolute = scheduler is not None and scheduler["type"] in ABSOLUTE_SCHEDULERS
        if is_absolute and scheduler == self._load(found).parts.deepspeed["scheduler"]:
            raise UserError(
                f"{self.name}: lr_factor has no effect, because {scheduler['type']} has learning rates of "
                "its own: use `megalowbit.lr_schedule` in the place of `scheduler`"
            )
        return found

    @cached_property
    def config(self) -> PretrainConfig:
        """The resolved configuration.

        Raises:
            UserError: it is not valid; the message begins with the size and the recipe.
        """
        return self._load(self.overrides)

    def _load(self, overrides: Sequence[str]) -> PretrainConfig:
        try:
            return load_checked_config(self.study.base, list(overrides), world_size=1)
        except UserError as error:
            raise UserError(f"size {self.size.name!r}, {self.entry.name!r}: {error}") from None

    @property
    def run(self) -> Run:
        """The run, to read its records."""
        return Run(
            label=self.label,
            seed=self.seed,
            folder=self.path,
            config=self.study.base,
            overrides=self.overrides,
            program=self.program,
        )

    def settings(self, text: TextFacts) -> dict[str, Any]:
        """Everything on which the result depends, except the code and the machine."""
        return {
            "cell": {
                "size": self.size.name,
                "text": self.text,
                "steps": self.steps,
                "seed": self.seed,
                "recipe": self.entry.name,
                "lr_factor": self.lr_factor,
                "replica_of": self.entry.of if isinstance(self.entry, Replica) else None,
            },
            "config": _without_paths(self.config.to_dict()),
            "text": {"train_sha256": text.train_sha256, "heldout_sha256": text.heldout_sha256},
            **contents_of(self.config),
        }

    def check_settings(self, settings: Mapping[str, Any]) -> bool:
        """Compare with the settings that a run in this folder was started with; False if there is none.

        Raises:
            UserError: there is one with other settings, which are named, or they are damaged.
        """
        path = self.path / SETTINGS
        if not path.exists():
            return False
        saved = read_json_object(path)
        for key in ("cell", "config", "text"):
            if not isinstance(saved.get(key), dict):
                raise UserError(
                    f"{path} has no settings ({key!r} is missing or damaged): remove {self.path} to run the "
                    "cell again"
                )
        if found := self.changed_settings(saved, settings):
            raise UserError(
                f"{self.path} was run with other settings: {found}: change them back, or choose another --out"
            )
        return True

    def changed_settings(self, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
        """What differs between recorded settings and present ones, up to three of them; empty if nothing.

        A setting that is not recorded had the value that is the default now, as in checkpoints.
        """
        files = saved.get("files", {})  # earlier versions recorded none
        settings = {**settings, "files": {name: settings["files"].get(name, MISSING) for name in files}}
        saved = {**saved, "config": with_current_names(saved["config"]), "files": files}
        saved["recipe"] = with_default_fields(saved["recipe"]) if saved.get("recipe") else settings["recipe"]
        found = list(differences(saved, settings))
        if any(where.startswith("config.") and before == MISSING for where, before, _ in found):
            found = list(differences({**saved, "config": self._with_defaults(saved["config"])}, settings))
        if any(where.startswith("config.megalowbit.recipe") for where, *_ in found):  # its fields follow
            found = [each for each in found if not each[0].startswith("recipe.")]
        shown_ones = [f"{key} = {shown(now)} (was {shown(before)})" for key, before, now in found]
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return f"{'; '.join(shown_ones[:3])}{more}"

    def _with_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A recorded configuration with the settings that were added since, at their defaults."""
        given, present = json.loads(json.dumps(config)), self.config.to_dict()["megalowbit"]
        for section, key in REMOVED_PATHS:
            given["megalowbit"][section][key] = present[section][key]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(given), encoding="utf-8")
            try:
                return _without_paths(load_checked_config(path, [], world_size=1).to_dict())
            except UserError:  # a setting is gone: the differences name it
                return dict(config)

    @property
    def block(self) -> int:
        """Number of steps in the means of losses that are kept."""
        return block_of(self.study.window, self.study.marks, self.steps)

    def result(self) -> Result | None:
        """The result; None if the cell is not finished.

        Raises:
            UserError: it is damaged, or was written by another version.
        """
        path = self.path / RESULT
        if not path.exists():
            return None
        remedy = f"remove {self.path} to run the cell again"
        try:
            content = read_json_object(path)
        except UserError as error:
            raise UserError(f"{str(error).removesuffix(': fix it')}: {remedy}") from error
        found = result_of(content, str(path), remedy)
        self.check_steps(found, str(path), remedy)
        return found

    def check_steps(self, result: Result, where: str, remedy: str) -> None:
        """Check that a result is one of as many steps.

        Raises:
            UserError: it is not; begins with `where`, ends with `remedy`.
        """
        steps, diverged_at = result.loss_means(self.block).steps, result.diverged_at
        if diverged_at is None and steps != self.steps:
            raise UserError(f"{where} has the losses of {steps} of {self.steps} steps: {remedy}")
        if diverged_at is not None and not 1 <= diverged_at <= self.steps:
            raise UserError(f"{where} has diverged_at {diverged_at} of {self.steps} steps: {remedy}")

    def check_block(self, result: Result, where: str) -> None:
        """Check that the means of the study's windows can be computed from a kept result.

        Raises:
            UserError: they cannot; begins with `where`.
        """
        kept = result.loss_means(self.block).block
        if self.block % kept:
            raise UserError(
                f"{where} has means of {kept} steps: make `window` and `marks` of the study multiples of it"
            )

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file into the cell's folder, atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.path / name) as file:
            file.write(json.dumps(value, indent=1) + "\n")


def cells_of(study: StudySettings, folder: Path, program: Path) -> list[Cell]:
    """All cells; seed by seed, so that whole pairs are there early, and the baseline first."""
    entries: list[tuple[RecipeEntry | Replica, float]] = [
        (recipe, factor)
        for recipe in sorted(study.recipes, key=lambda each: each.name != study.baseline)
        for factor in recipe.lr_factors
    ]
    entries += [(replica, replica.lr_factor) for replica in study.replicas]
    return [
        Cell(
            study=study,
            folder=folder,
            size=size,
            text=text.name,
            steps=steps,
            seed=seed,
            entry=entry,
            lr_factor=factor,
            program=program,
        )
        for size in study.sizes
        for steps in size.steps or study.steps
        for seed in study.seeds
        for text in study.texts
        for entry, factor in entries
    ]


def check_folder(cells: Sequence[Cell]) -> None:
    """Check that the finished cells in the study's folder are those of the study.

    Raises:
        UserError: there are others, which a report would leave out and whose `study.json` it would replace.
    """
    folder, known = cells[0].folder, {cell.name for cell in cells}
    others = sorted(
        path.parent.name for path in (folder / CELLS).glob(f"*/{RESULT}") if path.parent.name not in known
    )
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise UserError(
            f"{folder} has finished cells that are not in this study ({others[0]}{more}): use another --out, "
            "restore the study, or move these cells away"
        )


@contextmanager
def locked(cell: Cell) -> Iterator[None]:
    """Hold the cell's lock, which ends with the process.

    Raises:
        TransientError: another process runs the cell.
    """
    folder = cell.folder / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    with open_regular(folder / cell.name, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TransientError(f"{cell.name} {RUN_ELSEWHERE}: wait for it") from None
        yield


def cell_named(study: StudySettings, folder: Path, program: Path, name: str) -> Cell:
    """The cell with this name.

    Raises:
        UserError: there is none.
    """
    known = {cell.name: cell for cell in cells_of(study, folder, program)}
    if name not in known:
        raise unknown_name("cell", name, known)
    return known[name]


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = plain(config)
    for section, key in REMOVED_PATHS:
        copied["megalowbit"][section].pop(key, None)
    return copied
