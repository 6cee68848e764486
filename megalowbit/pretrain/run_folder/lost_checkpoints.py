"""Was there a checkpoint, and where is it: asked before a run is begun again in a folder that has records.

A run that died before its first complete checkpoint begins again at step 0, for nothing is lost. One whose
checkpoints have gone (a folder removed, a link whose target is away, manifests removed) would train again
what it has trained, and write over its records; it is refused. What tells them apart is `saved.json`, which
a run writes when it begins and changes at its first complete checkpoint, and what only the end of a run or of
a save writes. Runs of versions without `saved.json` are judged by how many steps their records hold.
Damaged checkpoints are the store's (`engine.checkpoints.store`), which moves them aside and has its own line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megalowbit.durable_files import (
    LATEST,
    MANIFEST,
    complete_steps,
    damaged_in,
    is_interrupted_save,
    step_name,
    steps_in,
)
from megalowbit.errors import UserError, shown
from megalowbit.json_text import read_json_object
from megalowbit.pretrain.run_folder.folder import METRICS, RunFolder
from megalowbit.telemetry.sinks.jsonl import last_step


def check_checkpoints_are_there(folder: RunFolder, *, is_resume: bool) -> None:
    """Refuse to begin at step 0 what has been trained further; on one rank, which holds the folder.

    Only with `is_resume` may there be a run in the folder, which is continued.

    Raises:
        UserError: checkpoints were completed here and none is left, `checkpoints` is no folder, an
            interrupted `--restart` has moved only a part of the run, or the folder is no run's and has what
            a run would overwrite.
    """
    place = folder.checkpoints
    if os.path.lexists(place) and not place.is_dir():
        raise UserError(f"{_not_a_folder(place)}: put the checkpoints' folder there, or remove {place}")
    if not is_resume:
        return
    if folder.interrupted_restart is not None:
        raise UserError(
            f"a --restart of {folder.path} was interrupted, {folder.interrupted_restart.name} holds what it "
            "had moved: start again with --restart, which moves the rest"
        )
    if complete_steps(place) or damaged_in(place):
        return
    if os.path.lexists(folder.tokenizer) and not _has_begun(folder):
        raise UserError(
            f"{folder.tokenizer} was not written by a run, which would write over it: move it away, or "
            "choose another --run-dir"
        )
    evidence = _evidence(folder)
    if evidence is not None:
        raise UserError(
            f"the run in {folder.path} has saved checkpoints ({evidence}), and {_missing(place)}: put them "
            f"back to go on, or begin at step 0 with --run-dir {folder.path} --restart, which moves what is "
            "there aside and removes nothing"
        )


def _has_begun(folder: RunFolder) -> bool:
    """Whether a run has written here; its records are the first that it opens."""
    names = (folder.config, folder.saved, *folder.path.glob(f"{METRICS}*"))
    return any(map(os.path.lexists, names))


def _evidence(folder: RunFolder) -> str | None:
    """What shows that a checkpoint was once complete; `None`: nothing does."""
    for path in (folder.done, folder.summary, folder.hf, *sorted(folder.path.glob("hf-step-*"))):
        if os.path.lexists(path):
            return f"it has {path.name}"
    if os.path.lexists(folder.checkpoints / LATEST):  # written after a manifest
        return f"there is {folder.checkpoints.name}/{LATEST}"
    if os.path.lexists(folder.saved):
        return _evidence_of_note(folder)
    return _evidence_of_records(folder)


def _evidence_of_note(folder: RunFolder) -> str | None:
    try:
        step = folder.first_saved_step()
    except UserError as error:
        return str(error)
    if step is not None:
        return f"{folder.saved.name} says so of step {step}"
    for each in steps_in(folder.checkpoints):
        if not is_interrupted_save(folder.checkpoints / step_name(each)):
            return f"{step_name(each)} is there"
    return None


def _evidence_of_records(folder: RunFolder) -> str | None:
    """Of a run from before `saved.json` was written: it trained beyond the step of its first checkpoint."""
    last = last_step(folder.path / METRICS)
    if last == 0:
        return None
    if not folder.is_started:
        return f"{METRICS} has step {last}, though {folder.config.name} is gone"
    every = _first_due(read_json_object(folder.config))
    return f"{METRICS} goes to step {last}, the first was due after step {every}" if last > every else None


def _first_due(config: dict[str, Any]) -> int:
    """The step after which a run of this configuration has its first checkpoint."""
    block = config.get("megalowbit")
    sections = {} if not isinstance(block, dict) else block
    for section, key in (("checkpoint", "every"), ("run", "steps")):
        values = sections.get(section)
        every = values.get(key) if isinstance(values, dict) else None
        if type(every) is int and every > 0:
            return every
    return 0


def _missing(place: Path) -> str:
    if not place.exists():
        return f"{place} does not exist"
    if steps_in(place):
        return f"no step in {place} has a {MANIFEST}"
    return f"{place} has none"


def _not_a_folder(place: Path) -> str:
    if place.is_symlink() and not place.exists():
        return f"{place} is a link to {shown(str(place.readlink()))}, which does not exist"
    return f"{place} is no folder"
