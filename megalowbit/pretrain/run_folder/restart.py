"""`--restart`: move the files of a run aside, which frees its folder for a run from step 0.

The files are renamed into `before-restart-1/` (or `-2`, …) within the run folder. Nothing is copied or
removed, links stay links, and files that the user put there stay where they are. During the move the new
folder is named `before-restart-1.moving`. After a kill, the next `--restart` continues the move and
`--resume auto` raises an error. TensorBoard files that the `tensorboard` block places elsewhere stay there.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from megalowbit.durable_files import sync
from megalowbit.errors import UserError, file_system_error
from megalowbit.pretrain.run_folder.folder import (
    ASIDE_PREFIX,
    MOVING_SUFFIX,
    RECORDS,
    RunFolder,
    first_free,
    numbered,
)
from megalowbit.records.files import ATTEMPTS, CONFIG, DONE, RANK_ATTEMPTS, REPORT, SAVED, SUMMARY

RUN_FILES = (
    CONFIG,
    SAVED,
    SUMMARY,
    DONE,
    *RECORDS,
    *(f"{name}.[0-9]*" for name in RECORDS),
    ATTEMPTS,
    RANK_ATTEMPTS,
    REPORT,
    "stack-rank*.txt",
    "tokenizer",
    "tensorboard",
    "wandb",
    "trackio",
    "hf",
    "hf-step-*",
    "checkpoints",
)
RUN_MARKERS = (SAVED, "checkpoints", *RECORDS)  # the other names are not specific to runs


def check_restart(folder: Path) -> None:
    """Check that a folder is empty or holds a run.

    Raises:
        UserError: the folder holds other files only, or cannot be read.
    """
    try:
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    except OSError as error:
        message = f"run folder {folder} cannot be read ({error.strerror}): choose another --run-dir"
        raise file_system_error(message, error) from error
    # a restart that was killed before its first record leaves only the files it had moved
    is_run = any(name in RUN_MARKERS or name.startswith(f"{ASIDE_PREFIX}-") for name in names)
    if names - {".lock"} and not is_run:
        raise UserError(f"{folder} does not hold a run to restart: choose another --run-dir")


def move_aside(folder: RunFolder) -> Path | None:
    """Move the run's files aside; call it on the rank that holds the folder's lock.

    Returns:
        The folder to which they were moved; `None` if there were none.

    Raises:
        UserError: a file cannot be moved. The message names the folder with the files moved so far.
    """
    names = sorted(
        {path.name for pattern in RUN_FILES for path in folder.path.glob(pattern)} | _dangling(folder.path)
    )
    moving = folder.interrupted_restart
    if not names and moving is None:
        return None
    if moving is None:
        target = first_free(folder.path / f"{ASIDE_PREFIX}-{number}" for number in count(1))
    else:
        target = moving.with_name(moving.name.removesuffix(MOVING_SUFFIX))
    moving = target.with_name(target.name + MOVING_SUFFIX)
    try:
        moving.mkdir(exist_ok=True)
        for name in names:  # a killed restart may have moved a file of the same name already
            os.rename(folder.path / name, first_free(numbered(moving / name)))  # noqa: PTH104
        sync(moving)
        moving.rename(target)
        sync(folder.path)
    except OSError as error:
        message = (
            f"the run in {folder.path} cannot be moved aside to {moving.name} ({error.filename or moving}: "
            f"{error.strerror}): fix that and start again with --restart"
        )
        raise file_system_error(message, error) from error
    return target


def _dangling(folder: Path) -> set[str]:
    """Names that are dangling links, which `glob` does not report."""
    return {name for name in RUN_FILES if os.path.lexists(folder / name)}
