"""A folder that is created as a whole, and whose creation continues where it was interrupted.

The folder is built as a draft beside its final place, as `new_folder` does. A journal in the draft has a key
(all that the result depends on) and size and SHA-256 of every finished file. A second attempt with the same
key continues in the draft of an interrupted one, with the files that are still whole; a draft with another
key is removed. A process holds a lock on its draft, so that another does not take it over.

An interruption (Ctrl-C, a kill, a lost file system) leaves the draft; any other error removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megalowbit.durable_files import FileFacts, atomic_file, sha256_of
from megalowbit.errors import TransientError, UserError
from megalowbit.hf.folders.new_folder import cannot_write, refuse_existing
from megalowbit.json_text import read_json_object

JOURNAL = "conversion.json"
FORMAT = 1


class Draft:
    """The folder that is being built.

    Attributes:
        path: where it is.
        finished: the finished files by their path in the folder.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], finished: Mapping[str, FileFacts]) -> None:
        self.path, self._key, self.finished = path, key, dict(finished)

    def note(self, name: str) -> None:
        """Record a finished file, which is on the disk."""
        path = self.path / name
        self.finished[name] = FileFacts(name, path.stat().st_size, sha256_of(path))
        self.write_journal()

    def write_journal(self) -> None:
        """Write key and finished files; a draft with a journal is one of a conversion."""
        files = [each._asdict() for each in self.finished.values()]
        with atomic_file(self.path / JOURNAL) as file:
            file.write(json.dumps({"format": FORMAT, "key": self._key, "files": files}, indent=1) + "\n")


@contextmanager
def resumable_folder(folder: Path, key: Mapping[str, Any]) -> Iterator[Draft]:
    """Yield a draft, perhaps that of an interrupted attempt, that becomes `folder` if the block succeeds.

    Args:
        folder: a new folder.
        key: JSON values; files of an earlier attempt are used only if it had the same ones.

    Raises:
        UserError: `folder` exists and is not empty, or cannot be written.
    """
    refuse_existing(folder)
    folder = folder.absolute()  # "." has no name
    is_kept = False
    descriptor, draft = -1, None
    try:
        # as JSON gives it back
        descriptor, draft = _claim(folder, json.loads(json.dumps(key)))
        yield draft
        (draft.path / JOURNAL).unlink(missing_ok=True)
        draft.path.rename(folder)
    except (OSError, SafetensorError) as error:  # safetensors raises its own error when the disk is full
        converted = cannot_write(folder, error)
        is_kept = isinstance(converted, TransientError)
        raise converted from error
    except (KeyboardInterrupt, SystemExit, TransientError):
        is_kept = True
        raise
    finally:
        if draft is not None and not (is_kept and draft.finished):
            shutil.rmtree(draft.path, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


def unfinished(folder: Path) -> list[Path]:
    """Drafts of `folder` that interrupted attempts have left."""
    folder = folder.absolute()
    own = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}\.tmp")  # not those of NAME.1
    try:
        entries = sorted(folder.parent.iterdir())
    except OSError:
        return []
    return [each for each in entries if own.fullmatch(each.name) and (each / JOURNAL).is_file()]


def _claim(folder: Path, key: Mapping[str, Any]) -> tuple[int, Draft]:
    """A locked draft, and the descriptor that holds the lock."""
    for path in unfinished(folder):
        descriptor = _lock(path)
        if descriptor is None:
            continue
        with suppress(UserError):  # a journal that cannot be read proves nothing
            content = read_json_object(path / JOURNAL)
            if content.get("format") == FORMAT and content.get("key") == key:
                finished = _whole_files(path, content.get("files"))
                _remove_others(path, finished)
                return descriptor, Draft(path, key, finished)
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)
    path = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    path.mkdir(parents=True)
    draft = Draft(path, key, {})
    try:
        # before any other file, so that the next attempt finds the draft of a process that was killed at once
        draft.write_journal()
        if (descriptor := _lock(path)) is None:
            raise UserError(f"{path} was locked by another process: try again")
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return descriptor, draft


def _lock(path: Path) -> int | None:
    """The descriptor of a locked folder; None: another process has it, or another user could have made it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _whole_files(draft: Path, entries: Any) -> dict[str, FileFacts]:
    """The files of a journal that are still what they were."""
    found = {}
    for entry in entries if isinstance(entries, list) else ():
        with suppress(TypeError, OSError, ValueError):
            facts = FileFacts(**entry)
            path = draft / facts.name
            is_inside = ".." not in path.parts and path.is_relative_to(draft)
            is_same_size = (
                is_inside and stat.S_ISREG(path.lstat().st_mode) and path.stat().st_size == facts.size
            )
            if is_same_size and sha256_of(path) == facts.sha256:
                found[facts.name] = facts
    return found


def _remove_others(draft: Path, finished: Mapping[str, FileFacts]) -> None:
    """Remove all files but the finished ones and the journal."""
    kept = {draft / name for name in (*finished, JOURNAL)}
    for place, folders, files in os.walk(draft):
        for name in files:
            if (path := Path(place) / name) not in kept:
                path.unlink()
        for name in folders:
            if (path := Path(place) / name).is_symlink():
                path.unlink()
