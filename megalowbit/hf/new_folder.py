"""A folder that appears whole or not at all, and never in place of another."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megalowbit.errors import UserError, file_system_error


def refuse_existing(folder: Path) -> None:
    """Check that `folder` may be written: absent, or an empty folder.

    Raises:
        UserError: there is something under that name, or it cannot be a name.
    """
    try:
        is_free = (
            not any(folder.iterdir()) if folder.is_dir() else not (folder.exists() or folder.is_symlink())
        )
    except OSError as error:  # a name of more than 255 bytes, a folder that may not be looked into
        raise UserError(f"{folder} cannot be used ({error.strerror}): name another folder") from error
    if not is_free:
        raise UserError(f"{folder} exists already and is never overwritten: name a new folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` when the block ends well, and removed otherwise.

    Raises:
        UserError: `folder` exists and is not empty, or cannot be written.
    """
    refuse_existing(folder)
    folder = folder.absolute()  # "." has no name
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        draft.mkdir(parents=True)
        yield draft
        draft.rename(folder)
    except (OSError, SafetensorError) as error:  # the latter is how a full disk under weights shows
        reason = getattr(error, "strerror", None) or error
        message = f"{folder} cannot be written ({reason}): check the place and its free room"
        raise file_system_error(message, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
