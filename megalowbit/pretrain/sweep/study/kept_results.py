"""The cells in a `study.json`: written small, read back, and counted as finished in another folder.

The settings of the first cell are stored whole, and those of the others as what they change in them. Commit,
versions and machine are stored once for all cells that have the same. A cell is one line of the file, so that
a comparison of two versions of it shows which cells were added.

`take_over` copies results into the folder of a study, where they are finished cells like others. It only does
so if they are what this study would compute: equal settings, equal texts, equal versions of the packages on
which numbers depend. The machine may be another one, so the last bits may differ within a pair; reports say
how many pairs that are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalowbit.errors import TransientError, UserError
from megalowbit.json_text import read_json_object
from megalowbit.pretrain.sweep.study.cells import RESULT, SETTINGS, Cell, locked
from megalowbit.pretrain.sweep.study.results import Origin, Recorded, Result, command_of, result_of
from megalowbit.pretrain.sweep.study.texts import TextFacts

FORMAT = 2
OWN_FIELDS = ("tokens", "skipped_steps", "diverged_at", "heldout", "cost")  # as they are in a result


class KeptText(Recorded):
    """What identifies a text."""

    description: str
    train_sha256: str
    heldout_sha256: str


class KeptFile(Recorded):
    """A `study.json`, as far as it is read again."""

    study: dict[str, Any]
    base: dict[str, Any]
    model: dict[str, Any] | None
    texts: dict[str, KeptText]
    origins: list[dict[str, Any]]
    settings: dict[str, Any]
    cells: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class KeptStudy:
    """A `study.json` that was read.

    Attributes:
        path: the file.
        content: the study, its configuration and its texts.
        results: name of a cell → its result.
    """

    path: Path
    content: KeptFile
    results: Mapping[str, Result]


def to_kept(cells: Mapping[str, tuple[Cell, Result]], root: Path) -> dict[str, Any]:
    """`origins`, `settings` and `cells` of a study.json.

    Args:
        cells: the finished ones, by name.
        root: the repository.
    """
    settings = {name: result.settings.model_dump() for name, (_, result) in cells.items()}
    first = next(iter(settings.values()), {})
    origins: list[dict[str, Any]] = []
    found = {}
    for name, (cell, result) in cells.items():
        origin = result.made_with.model_dump()
        origin["command"] = _of_the_study(command_of(origin["command"], root))
        if origin not in origins:
            origins.append(origin)
        values = result.model_dump()
        found[name] = {
            "changes": changes(first, settings[name]),
            "losses": result.loss_means(cell.block).model_dump(),
            **{key: values[key] for key in OWN_FIELDS},
            "origin": origins.index(origin),
        }
    return {"origins": origins, "settings": first, "cells": found}


def read_kept(path: Path) -> KeptStudy:
    """Read a study.json.

    Raises:
        UserError: it is none, was written by another version, or is damaged.
    """
    data = read_json_object(path)
    remedy = "name a study.json that megalowbit study has written"
    if data.get("format") != FORMAT:
        raise UserError(f"{path} has no 'format' {FORMAT}: {remedy} in this version")
    try:
        content = KeptFile.model_validate(data)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(f"{path} is damaged ({where!r} is missing or has another type): {remedy}") from None
    results = {}
    # as text, so that only a whole number is a place, not false, 0.0 or -1
    origins = {json.dumps(place): origin for place, origin in enumerate(content.origins)}
    for name, cell in content.cells.items():
        value = {key: cell[key] for key in (*OWN_FIELDS, "losses") if key in cell}
        try:
            value["made_with"] = origins[json.dumps(cell["origin"])]
            value["settings"] = changed(content.settings, cell["changes"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(
                f"{path}: {name} is damaged ('origin' or 'changes'): restore the file, or leave it out"
            ) from None
        results[name] = result_of(value, f"{path}: {name}", "restore the file, or leave it out")
    return KeptStudy(path, content, results)


def take_over(kept: KeptStudy, cells: Sequence[Cell], facts: Mapping[str, TextFacts], present: Origin) -> int:
    """Copy results of these cells into their folders, unless they are finished there.

    Args:
        kept: the results.
        cells: of a study.
        facts: name of a text → what identifies it here.
        present: what a cell would be made with here.

    Returns:
        How many were copied. Those that another process runs now are left to it.

    Raises:
        UserError: one of them is not what this study would compute here; nothing is copied.
    """
    wanted = [cell for cell in cells if cell.name in kept.results and cell.result() is None]
    for cell in wanted:
        _check(kept, cell, facts[cell.text], present)
    count = 0
    for cell in wanted:
        result = kept.results[cell.name].model_dump()
        try:
            with locked(cell):
                if cell.result() is not None:  # another process has finished it meanwhile
                    continue
                cell.write(SETTINGS, result["settings"])
                cell.write(RESULT, result)
                count += 1
        except TransientError:
            continue
    return count


def check_text(recorded: KeptText, facts: TextFacts) -> None:
    """Compare a text with the recorded one.

    Raises:
        UserError: it is another text, perhaps because of another version.
    """
    for key in ("train_sha256", "heldout_sha256"):
        if getattr(recorded, key) != getattr(facts, key):
            found, before = (f"{each.description} ({getattr(each, key)[:8]})" for each in (facts, recorded))
            raise UserError(
                f"the text is not that of the study: {found}, not {before}: install that version, or restore "
                "the files"
            )


def _check(kept: KeptStudy, cell: Cell, facts: TextFacts, present: Origin) -> None:
    result = kept.results[cell.name]
    where, remedy = f"{kept.path}: {cell.name}", f"or leave {kept.path.name} out"
    if cell.text in kept.content.texts:
        try:
            check_text(kept.content.texts[cell.text], facts)
        except UserError as error:
            raise UserError(f"{where}: {error}, {remedy}") from None
    found = cell.changed_settings(result.settings.model_dump(), cell.settings(facts))
    if found:
        raise UserError(f"{where} was run with other settings: {found}: change them back, {remedy}")
    if other := result.made_with.other_version(present):
        name, before, now = other
        raise UserError(
            f"{where} was made with {name} {before}, and {now} is installed: install {before}, {remedy}"
        )
    cell.check_steps(result, where, f"restore the file, {remedy}")
    cell.check_block(result, where)


def changes(before: Any, now: Any, path: tuple[str, ...] = ()) -> list[list[Any]]:
    """What turns one object into another: `[path, value]` for new values, `[path]` for keys that are gone."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        found: list[list[Any]] = [[[*path, key]] for key in before if key not in now]
        for key, value in now.items():
            found += changes(before[key], value, (*path, key)) if key in before else [[[*path, key], value]]
        return found
    return [] if json.dumps(before) == json.dumps(now) else [[list(path), now]]  # 1 is not 1.0


def changed(before: Mapping[str, Any], found: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The object that `changes` describe."""
    result: dict[str, Any] = copy.deepcopy(dict(before))
    for (*folder, last), *value in found:
        place = result
        for key in folder:
            place = place[key]
        if value:
            (place[last],) = value
        else:
            del place[last]
    return result


def _of_the_study(command: Sequence[str]) -> list[str]:
    """The command without the name of the cell."""
    if "--cell" not in command:
        return list(command)
    place = command.index("--cell")
    return [*command[:place], *command[place + 2 :]]
