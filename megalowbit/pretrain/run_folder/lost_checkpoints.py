"""Detects missing checkpoints before a resumed run starts at step 0 in a folder that has records.

A run that died before its first complete checkpoint restarts at step 0; nothing is lost. A run whose
checkpoints have disappeared is rejected, because it would repeat its training and overwrite its records.
Checkpoints disappear when their folder, the target of a link or the manifests are removed.

`saved.json` distinguishes the two cases: a run writes it at its start and updates it at its first complete
checkpoint. Files that only a finished run or save writes are evidence as well. For runs of versions without
`saved.json`, the number of recorded steps decides. Not covered: damaged checkpoints, which the store
(`engine.checkpoints.store`) moves aside and reports.
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
from megalowbit.pretrain.run_folder.folder import RunFolder
from megalowbit.records.files import METRICS
from megalowbit.telemetry.sinks.jsonl import last_step


def check_checkpoints_are_there(folder: RunFolder, *, is_resume: bool) -> None:
    """Reject a folder whose checkpoints are missing; call it on the rank that holds the folder's lock.

    The folder can hold a run only if `is_resume`.

    Raises:
        UserError: the run had complete checkpoints and none is left; `checkpoints` is not a folder; an
            interrupted `--restart` has moved only part of the run; or the folder does not hold a run but
            has files that a run would overwrite.
    """
    place = folder.checkpoints
    if os.path.lexists(place) and not place.is_dir():
        raise UserError(f"{_not_a_folder(place)}: put the checkpoints' folder there, or remove {place}")
    if not is_resume:
        return
    if folder.interrupted_restart is not None:
        raise UserError(
            f"a --restart of {folder.path} was interrupted after it had moved some files to "
            f"{folder.interrupted_restart.name}: start again with --restart, which moves the rest"
        )
    if complete_steps(place) or damaged_in(place):
        return
    if os.path.lexists(folder.tokenizer) and not _has_begun(folder):
        raise UserError(
            f"{folder.tokenizer} was not written by a run, and this run would overwrite it: move it away, or "
            "choose another --run-dir"
        )
    evidence = _evidence(folder)
    if evidence is not None:
        raise UserError(
            f"the run in {folder.path} has saved checkpoints ({evidence}), but {_missing(place)}: put them "
            f"back to continue, or start over with --run-dir {folder.path} --restart, which moves the "
            "old files aside and removes nothing"
        )


def _has_begun(folder: RunFolder) -> bool:
    """Whether a run has written here; it opens its records first."""
    names = (folder.config, folder.saved, *folder.path.glob(f"{METRICS}*"))
    return any(map(os.path.lexists, names))


def _evidence(folder: RunFolder) -> str | None:
    """Evidence that a checkpoint was once complete; `None` if there is none."""
    for path in (folder.done, folder.summary, folder.hf, *sorted(folder.path.glob("hf-step-*"))):
        if os.path.lexists(path):
            return f"it has {path.name}"
    if os.path.lexists(folder.checkpoints / LATEST):  # written after the manifest
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
        return f"{folder.saved.name} names step {step}"
    for each in steps_in(folder.checkpoints):
        if not is_interrupted_save(folder.checkpoints / step_name(each)):
            return f"{step_name(each)} is there"
    return None


def _evidence_of_records(folder: RunFolder) -> str | None:
    """For runs of versions without `saved.json`: the run trained past the step of its first checkpoint."""
    last = last_step(folder.path / METRICS)
    if last == 0:
        return None
    if not folder.is_started:
        return f"{METRICS} has step {last}, though {folder.config.name} is missing"
    every = _first_due(read_json_object(folder.config))
    return f"{METRICS} ends at step {last}, the first was due after step {every}" if last > every else None


def _first_due(config: dict[str, Any]) -> int:
    """The step after which a run with this configuration saves its first checkpoint."""
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
    return f"{place} is not a folder"
