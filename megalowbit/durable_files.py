"""Atomic files, and checkpoint folders that can be verified against a manifest.

**Files.** A file is written under a temporary name in the same folder, synced to disk and renamed. A crash at
any moment leaves either the old file or the new one.

**Checkpoints.** A checkpoint is a folder `step-00000040`. Its `manifest.json`, written last, lists the size
and SHA-256 of each file. The newest checkpoint of a run is the highest complete step; pointer files do not
count.

    manifest   .saving   the folder is
    yes        –         complete
    no         yes       left by an interrupted save; it may be removed
    no         no        a checkpoint that lost its manifest later; it is kept

A damaged checkpoint is renamed to `step-00000040.damaged` and never removed. This module needs only the
standard library, so listing checkpoints does not import torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple

from megalowbit.errors import TRANSIENT_ERRNOS, TransientError, UserError, file_system_error, shown
from megalowbit.json_text import parse_json, read_text

MANIFEST = "manifest.json"
SAVING = ".saving"  # in a checkpoint's folder until the manifest is written
LATEST = "latest"  # names the newest step for DeepSpeed's tools; this package never reads it
FORMAT = 1
STEP = re.compile(r"step-([0-9]{8,})")
DRAFT = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
DAMAGED = ".damaged"
READ_SIZE = 2**22  # bytes
PART = ".pt"  # suffix of a checkpoint's files; other files in the folder are the user's


class FileFacts(NamedTuple):
    """One entry of a manifest: path relative to the folder, bytes, hexadecimal digest."""

    name: str
    size: int
    sha256: str


@contextmanager
def atomic_file(path: Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open a temporary file that replaces `path` when the block ends; it is removed if the block fails.

    The folder must exist. `"w"` opens a UTF-8 text file. Several processes may write the same file at the
    same time: the last one wins.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    # "x": fails if somebody has guessed the name and created a link there
    file = draft.open(mode.replace("w", "x"), encoding="utf-8" if mode == "w" else None)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync(path.parent)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # as of a failed write
            error.filename = str(path)
        raise


def open_regular(path: Path, mode: Literal["a", "a+", "w"], *, buffering: int = -1) -> IO[str]:
    """Open a text file for writing in place, in a folder that others may write to; create it if missing.

    A link is not followed, because its target would be overwritten. The call does not wait for a pipe's
    reader.

    Raises:
        UserError: `path` exists and is not a regular file.
        OSError: as `open` raises it.
    """

    def opener(name: str, flags: int) -> int:
        # "w" truncates below, after the check for a regular file
        flags = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, 0o666)

    try:
        file = open(path, mode, buffering=buffering, encoding="utf-8", newline="\n", opener=opener)  # noqa: SIM115
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # link, pipe without a reader, folder
            raise _not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _not_regular(path)
    if mode == "w":
        file.truncate(0)
    return file


def refuse_special_file(path: Path, option: str) -> None:
    """Refuse an output of the command line that `atomic_file` would replace, or fail on, after the work.

    A link to a regular file is accepted, and so is a path that does not exist. As root, renaming a file onto
    a device such as `/dev/full` removes the device.

    Args:
        path: as the user gave it.
        option: that named it, for the message.

    Raises:
        UserError: `path` is a folder, or exists and is not a regular file; or it cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # a long name; a null byte
        raise file_system_error(f"{option} {shown(str(path))} is no valid path ({error})", error) from error
    if stat.S_ISDIR(mode):
        raise UserError(f"{option} {path} is a folder: name a file")
    if not stat.S_ISREG(mode):
        raise UserError(f"{option} {path} is not a regular file: name another")


def _not_regular(path: Path) -> UserError:
    return UserError(f"{path} is a link or not a regular file, so it is not written to: remove it")


class HashingFile:
    """A file for writing that records the size and SHA-256 of its content, and the first failed write."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0
        self.failure: OSError | None = None  # writers such as torch's do not pass it on

    def write(self, piece: bytes) -> int:
        self._digest.update(piece)
        self.size += len(piece)
        try:
            return self._file.write(piece)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def flush(self) -> None:
        self._file.flush()

    def facts(self, name: str) -> FileFacts:
        """The manifest's entry of this file, under `name`."""
        return FileFacts(name, self.size, self._digest.hexdigest())


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_SIZE):
            digest.update(piece)
    return digest.hexdigest()


def write_manifest(folder: Path, known: Iterable[FileFacts] = ()) -> None:
    """Write the manifest of all files in and below `folder`, which marks the checkpoint as complete.

    `known` are entries from the writers of the files. All other files are read and hashed.

    Raises:
        OSError: a file of `known` is missing or has another size, or a file cannot be read or written.
    """
    manifest, facts = folder / MANIFEST, {entry.name: entry for entry in known}
    for entry in facts.values():
        if (folder / entry.name).stat().st_size != entry.size:
            raise OSError(f"{entry.name} does not have the size that was written")
    others = (manifest, folder / SAVING)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path not in others):
        name = path.relative_to(folder).as_posix()
        if name not in facts:
            facts[name] = FileFacts(name, path.stat().st_size, sha256_of(path))
    content = {"format": FORMAT, "files": [facts[name]._asdict() for name in sorted(facts)]}
    with atomic_file(manifest) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    (folder / SAVING).unlink(missing_ok=True)


def is_interrupted_save(folder: Path) -> bool:
    """Whether an interrupted save has left this folder, which was never a complete checkpoint."""
    return is_file(folder / SAVING) and not is_file(folder / MANIFEST)


def is_file(path: Path) -> bool:
    """As `Path.is_file`; also False if the folder may not be read.

    Raises:
        TransientError: the file system is not available at the moment.
        UserError: another error hides whether the file exists.
    """
    try:
        return path.is_file()
    except PermissionError:
        return False
    except OSError as error:
        message = f"{path} cannot be checked ({error.strerror}): repair the file system, or use another"
        raise file_system_error(message, error) from error


def read_manifest(folder: Path, *, remedy: str) -> list[FileFacts]:
    """Read the manifest of a checkpoint's folder; error messages end with `remedy`.

    Raises:
        UserError: the folder is missing; the manifest is missing, damaged or of another format.
        TransientError: the file system is not available at the moment.
    """
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder} does not exist: {remedy}")
    if not is_file(folder / MANIFEST):
        raise UserError(f"checkpoint {folder} is incomplete, it has no {MANIFEST}: {remedy}")
    try:
        content = parse_json(read_text(folder / MANIFEST), MANIFEST)
        facts = [_entry(entry["name"], entry["size"], entry["sha256"]) for entry in content["files"]]
        written_format = content["format"]
    except OSError as error:
        raise _unreadable(folder, MANIFEST, error, remedy) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"checkpoint {folder} is damaged: {MANIFEST} cannot be read; {remedy}") from error
    if written_format != FORMAT:
        raise UserError(
            f"checkpoint {folder} has format {written_format!r}, not {FORMAT}: use the version that wrote it"
        )
    if not facts:
        raise UserError(f"checkpoint {folder} is damaged: {MANIFEST} lists no file; {remedy}")
    return facts


def _entry(name: object, size: object, sha256: object) -> FileFacts:
    """One entry of a manifest; its file must be inside the checkpoint's folder."""
    if not (isinstance(name, str) and isinstance(sha256, str) and type(size) is int and size >= 0):
        raise ValueError("an entry needs a name, a size and a digest")
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise ValueError("a file is outside the folder")
    return FileFacts(name, size, sha256)


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint, such as `step-00000040`."""
    return f"step-{step:08d}"


def is_step_name(name: str) -> bool:
    """Whether this is the folder name of a checkpoint."""
    match = STEP.fullmatch(name)
    return match is not None and name == step_name(int(match[1]))


def steps_in(folder: Path) -> list[int]:
    """Steps with a checkpoint in `folder`, complete or not, ascending; empty if there is no such folder.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        message = f"{folder} cannot be read ({error.strerror}): make it readable, or use another folder"
        raise file_system_error(message, error) from error
    return sorted(int(name.removeprefix("step-")) for name in names if is_step_name(name))


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint in `folder`, ascending: the last one is the newest."""
    return [step for step in steps_in(folder) if is_file(folder / step_name(step) / MANIFEST)]


def verify_folder(folder: Path, *, remedy: str, share: int = 0, shares: int = 1) -> None:
    """Compare a checkpoint's files with its manifest; error messages end with `remedy`.

    Files that the manifest does not list are ignored, except `.pt` files, which could be read as part of the
    checkpoint. To divide the work, each process passes its number `share` out of `shares`.

    Raises:
        UserError: as `read_manifest`; or a file is missing or damaged: its name, the expected and the found
            value.
    """
    facts = read_manifest(folder, remedy=remedy)
    names = {entry.name for entry in facts}
    for path in sorted(folder.glob("*" + PART)):
        if path.name not in names:
            raise UserError(
                f"checkpoint {folder} is damaged: {path.name} is not listed in {MANIFEST}; {remedy}"
            )
    for name, size, sha256 in facts[share::shares]:
        path, damaged = folder / name, f"checkpoint {folder} is damaged: {name}"
        if not is_file(path):
            raise UserError(f"{damaged} is missing; {remedy}")
        if (found_size := path.stat().st_size) != size:
            raise UserError(f"{damaged} has {found_size} bytes instead of {size}; {remedy}")
        try:
            found = sha256_of(path)
        except OSError as error:
            raise _unreadable(folder, name, error, remedy) from error
        if found != sha256:
            raise UserError(f"{damaged} has SHA-256 {found[:12]}… instead of {sha256[:12]}…; {remedy}")


def _unreadable(folder: Path, name: str, error: OSError, remedy: str) -> UserError:
    """An error that retrying may cure is transient, all others mean damage; EIO does not go away."""
    reason = f"{name} cannot be read ({error.strerror})"
    if error.errno in TRANSIENT_ERRNOS - {errno.EIO}:
        return TransientError(f"checkpoint {folder}: {reason}: try again when the file system is back")
    return UserError(f"checkpoint {folder} is damaged: {reason}; {remedy}")


def has_all_files(folder: Path) -> bool:
    """Whether all files of a checkpoint exist with the right size, as far as is known; none is read."""
    try:
        facts = read_manifest(folder, remedy="")
        return all((folder / entry.name).stat().st_size == entry.size for entry in facts)
    except FileNotFoundError:
        return False
    except (OSError, TransientError):  # an unavailable file system does not mean missing files
        return True
    except UserError:
        return False


def remove_folder(folder: Path) -> None:
    """Remove a folder. A kill at any moment leaves the full folder, or a draft under a temporary name."""
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    folder.rename(draft)
    if draft.is_symlink():
        draft.unlink()  # keep the target of the link
    else:
        shutil.rmtree(draft)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, which frees its step for another save; returns the new path."""
    number, target = 1, folder.with_name(folder.name + DAMAGED)
    while os.path.lexists(target):
        number += 1
        target = folder.with_name(f"{folder.name}{DAMAGED}-{number}")
    folder.rename(target)
    sync(folder.parent)
    return target


def damaged_in(folder: Path) -> list[str]:
    """Names of the checkpoints in `folder` that were renamed because of damage, lowest step first."""
    found = [path.name for path in folder.glob(f"step-*{DAMAGED}*") if path.is_dir()]
    return sorted(name for name in found if is_step_name(name.partition(DAMAGED)[0]))


def remove_drafts(folder: Path, names: Iterable[str] = ("*",)) -> None:
    """Remove the drafts of files and folders that killed writers have left; nothing may be writing them now.

    `names` are patterns of the final names.
    """
    for draft in [path for name in names for path in folder.glob(f".{name}.*.tmp")]:
        if DRAFT.fullmatch(draft.name) and draft.is_dir() and not draft.is_symlink():
            shutil.rmtree(draft, ignore_errors=True)
        elif DRAFT.fullmatch(draft.name):
            with suppress(OSError):  # a draft that stays does no harm
                draft.unlink()


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's renames, to disk: they then survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for a writer
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
