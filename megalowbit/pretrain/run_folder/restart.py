"""`--restart`: what a run has written moves aside, and the folder is free for the same run from step 0.

Everything goes to `before-restart-1/` (or `-2`, …) in the run's folder by renaming, so no byte is copied or
removed, links stay links, and files that the user has put there stay where they are. While it lasts the new
folder is called `before-restart-1.moving`: after a kill the next `--restart` goes on with it, and
`--resume auto` refuses. Event files of a `tensorboard` block with a path elsewhere stay there.
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

RUN_FILES = (
    "config.json",
    "saved.json",
    "summary.json",
    "DONE",
    *RECORDS,
    *(f"{name}.[0-9]*" for name in RECORDS),
    "stack-rank*.txt",
    "tokenizer",
    "tensorboard",
    "wandb",
    "hf",
    "hf-step-*",
    "checkpoints",
)
RUN_MARKERS = ("saved.json", "checkpoints", *RECORDS)  # other names may be of anything


def check_restart(folder: Path) -> None:
    """Refuse to move files out of a folder that no run has written; a folder without files is free.

    Raises:
        UserError: also of a folder that cannot be looked into.
    """
    try:
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    except OSError as error:
        message = f"run folder {folder} cannot be looked into ({error.strerror}): choose another --run-dir"
        raise file_system_error(message, error) from error
    # a restart that was killed before its first record has left only what it had moved
    is_run = any(name in RUN_MARKERS or name.startswith(f"{ASIDE_PREFIX}-") for name in names)
    if names - {".lock"} and not is_run:
        raise UserError(f"{folder} holds no run that --restart could move aside: choose another --run-dir")


def move_aside(folder: RunFolder) -> Path | None:
    """Move what the run has written out of the way; on one rank, which holds the folder.

    Returns:
        Where it is; `None` if there was nothing.

    Raises:
        UserError: something cannot be moved; what has been moved is in the folder that the line names.
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
        for name in names:  # a restart that was killed may have moved one of that name already
            os.rename(folder.path / name, first_free(numbered(moving / name)))  # noqa: PTH104
        sync(moving)
        moving.rename(target)
        sync(folder.path)
    except OSError as error:
        message = (
            f"the run in {folder.path} cannot be moved aside to {moving.name} ({error.filename or moving}: "
            f"{error.strerror}): mend that and start again with --restart"
        )
        raise file_system_error(message, error) from error
    return target


def _dangling(folder: Path) -> set[str]:
    """Names without wildcards that are links to nothing, which a glob leaves out."""
    return {name for name in RUN_FILES if os.path.lexists(folder / name)}
