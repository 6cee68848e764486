"""A folder that is created completely or not at all, and never replaces another one."""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megalowbit.errors import UserError, file_system_error


def refuse_existing(folder: Path) -> None:
    """Check that `folder` may be written: it does not exist, or is an empty folder.

    Raises:
        UserError: the name is in use, or is invalid.
    """
    try:
        if folder.is_symlink():  # the finished folder could not take its place
            raise UserError(f"{folder} is a link: name the folder itself")
        if folder.absolute().is_mount():
            raise UserError(f"{folder} is a mount point: name a folder inside of it")
        is_free = not any(folder.iterdir()) if folder.is_dir() else not folder.exists()
    except OSError as error:  # a name of more than 255 bytes, or a folder that may not be read
        raise UserError(f"{folder} cannot be used ({error.strerror}): name another folder") from error
    if not is_free:
        raise UserError(f"{folder} already exists and is never overwritten: name a new folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` if the block succeeds, and removed otherwise.

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
    except (OSError, SafetensorError) as error:  # safetensors raises its own error when the disk is full
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def cannot_write(folder: Path, error: OSError | SafetensorError) -> UserError:
    """The error for a folder that cannot be written, or that another process has created meanwhile."""
    if getattr(error, "errno", None) in (errno.ENOTEMPTY, errno.EEXIST) and folder.is_dir():
        return UserError(f"{folder} has appeared meanwhile and is never overwritten: name a new folder")
    reason = getattr(error, "strerror", None) or error
    message = f"{folder} cannot be written ({reason}): check the path and the free space"
    return file_system_error(message, error)
