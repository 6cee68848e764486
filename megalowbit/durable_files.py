"""Files that are there wholly or not at all, and folders that can be checked against what was written.

A file is written beside its place, forced to disk and renamed; a crash at any moment leaves the old file or
the new one. A checkpoint is a folder with a `manifest.json`, written last, of size and SHA-256 of each of its
files; without it the folder is incomplete. One that also has `.saving` is what an interrupted save has left
and may be removed; without that mark the manifest was lost later, and the folder is kept. Such folders are
called `step-00000040`, and the newest of a run is the highest complete step, whatever any pointer file says.
One that is found damaged is moved aside, to `step-00000040.damaged`, and never removed. Only the standard
library is needed, so looking at checkpoints does not load torch.
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

from megalowbit.errors import TRANSIENT_ERRNOS, TransientError, UserError, file_system_error
from megalowbit.json_text import parse_json, read_text

MANIFEST = "manifest.json"
SAVING = ".saving"  # lies in a checkpoint's folder until the manifest is written
LATEST = "latest"  # names the newest step for DeepSpeed's tools; never read by us
FORMAT = 1
STEP = re.compile(r"step-([0-9]{8,})")
DRAFT = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
DAMAGED = ".damaged"
READ_SIZE = 2**22  # bytes
PART = ".pt"  # of a checkpoint; other files beside them are the user's


class FileFacts(NamedTuple):
    """One entry of a manifest: path relative to the folder, bytes, hexadecimal digest."""

    name: str
    size: int
    sha256: str


@contextmanager
def atomic_file(path: Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open a draft that takes the place of `path` when the block ends, and vanishes if the block fails.

    The folder must exist; `"w"` is for UTF-8 text. Writers of the same file at the same time do not disturb
    each other: the last one stays.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    # "x": whoever can guess the name must not have put a link there
    file = draft.open(mode.replace("w", "x"), encoding="utf-8" if mode == "w" else None)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def open_regular(path: Path, mode: Literal["a", "a+", "w"], *, buffering: int = -1) -> IO[str]:
    """Open a text file that is written in place, made if need be, in a folder that others may write to.

    A link is not followed, for what it leads to would be overwritten, and a pipe's reader not waited for.

    Raises:
        UserError: there is something else than an ordinary file under that name.
        OSError: as `open` raises it.
    """

    def opener(name: str, flags: int) -> int:
        # "w" truncates below, once it is known to be a file
        flags = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, 0o666)

    try:
        file = open(path, mode, buffering=buffering, encoding="utf-8", newline="\n", opener=opener)  # noqa: SIM115
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # link, pipe without a reader, folder
            raise _no_file(path) from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _no_file(path)
    if mode == "w":
        file.truncate(0)
    return file


def _no_file(path: Path) -> UserError:
    return UserError(f"{path} is a link or no ordinary file, and nothing is written through it: remove it")


class HashingFile:
    """A file for writing that keeps size and SHA-256 of what went through it, and why a write failed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0
        self.failure: OSError | None = None  # for writers, as torch's, that lose it on the way

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
        """What a manifest says of it, under `name`."""
        return FileFacts(name, self.size, self._digest.hexdigest())


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_SIZE):
            digest.update(piece)
    return digest.hexdigest()


def write_manifest(folder: Path, known: Iterable[FileFacts] = ()) -> None:
    """Write the manifest of all files in and below `folder`; its presence says that they are complete.

    `known` are facts that the files' writers have; other files are read again.

    Raises:
        OSError: also where a file of `known` is missing, or has another size.
    """
    manifest, facts = folder / MANIFEST, {entry.name: entry for entry in known}
    for entry in facts.values():
        if (folder / entry.name).stat().st_size != entry.size:
            raise OSError(f"{entry.name} has another size than was written")
    others = (manifest, folder / SAVING)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path not in others):
        name = path.relative_to(folder).as_posix()
        if name not in facts:
            facts[name] = FileFacts(name, path.stat().st_size, sha256_of(path))
    content = {"format": FORMAT, "files": [facts[name]._asdict() for name in sorted(facts)]}
    with atomic_file(manifest) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    (folder / SAVING).unlink(missing_ok=True)


def is_rest_of_save(folder: Path) -> bool:
    """Whether a folder is what an interrupted save has left, and nothing that was once a checkpoint."""
    return is_file(folder / SAVING) and not is_file(folder / MANIFEST)


def is_file(path: Path) -> bool:
    """As `Path.is_file`, and False too where the folder may not be looked into.

    Raises:
        TransientError: the file system is away.
        UserError: another reason why nobody can know.
    """
    try:
        return path.is_file()
    except PermissionError:
        return False
    except OSError as error:
        message = f"{path} cannot be looked at ({error.strerror}): mend the file system, or name another"
        raise file_system_error(message, error) from error


def read_manifest(folder: Path, *, remedy: str) -> list[FileFacts]:
    """Read what should be in a checkpoint's folder; `remedy` closes the messages.

    Raises:
        UserError: no such folder; no manifest, or a damaged one, or one of another format.
        TransientError: the file system is away.
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
        raise UserError(f"checkpoint {folder} has format {written_format!r}, not {FORMAT}: use its version")
    if not facts:
        raise UserError(f"checkpoint {folder} is damaged: {MANIFEST} names no file; {remedy}")
    return facts


def _entry(name: object, size: object, sha256: object) -> FileFacts:
    """One entry of a manifest, whose file lies in the checkpoint's folder."""
    if not (isinstance(name, str) and isinstance(sha256, str) and type(size) is int and size >= 0):
        raise ValueError("an entry has a name, a size and a digest")
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise ValueError("a file lies elsewhere")
    return FileFacts(name, size, sha256)


def step_name(step: int) -> str:
    """What the checkpoint of `step` is called: `step-00000040`."""
    return f"step-{step:08d}"


def is_step_name(name: str) -> bool:
    """Whether a checkpoint may be called so."""
    match = STEP.fullmatch(name)
    return match is not None and name == step_name(int(match[1]))


def steps_in(folder: Path) -> list[int]:
    """Steps with a checkpoint in `folder`, complete or not, ascending; none if there is no such folder.

    Raises:
        UserError: the folder cannot be looked into.
    """
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        message = f"{folder} cannot be looked into ({error.strerror}): make it readable, or name another"
        raise file_system_error(message, error) from error
    return sorted(int(name.removeprefix("step-")) for name in names if is_step_name(name))


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint in `folder`, ascending: the last one is the newest."""
    return [step for step in steps_in(folder) if is_file(folder / step_name(step) / MANIFEST)]


def verify_folder(folder: Path, *, remedy: str, share: int = 0, shares: int = 1) -> None:
    """Compare a checkpoint's files with its manifest; `remedy` closes the messages.

    What the manifest does not name is ignored unless it could be read as a part of the checkpoint. Processes
    that divide the work look at part number `share` of `shares` parts each.

    Raises:
        UserError: as `read_manifest`, or a file is missing or damaged: its name, what was expected and found.
    """
    facts = read_manifest(folder, remedy=remedy)
    names = {entry.name for entry in facts}
    for path in sorted(folder.glob("*" + PART)):
        if path.name not in names:
            raise UserError(
                f"checkpoint {folder} is damaged: {path.name} is not named by {MANIFEST}; {remedy}"
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
    """Damage, unless the file system is away; a disk that cannot read what it wrote (EIO) never will."""
    reason = f"{name} cannot be read ({error.strerror})"
    if error.errno in TRANSIENT_ERRNOS - {errno.EIO}:
        return TransientError(f"checkpoint {folder}: {reason}: try again when the file system is back")
    return UserError(f"checkpoint {folder} is damaged: {reason}; {remedy}")


def looks_whole(folder: Path) -> bool:
    """Whether all files of a checkpoint are there in their size, as far as can be seen; none is read."""
    try:
        facts = read_manifest(folder, remedy="")
        return all((folder / entry.name).stat().st_size == entry.size for entry in facts)
    except FileNotFoundError:
        return False
    except (OSError, TransientError):  # a file system that is away says nothing about it
        return True
    except UserError:
        return False


def remove_folder(folder: Path) -> None:
    """Remove a folder that nobody needs; a kill at any moment leaves a draft, and no part under its name."""
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    folder.rename(draft)
    if draft.is_symlink():
        draft.unlink()  # what it leads to is not ours
    else:
        shutil.rmtree(draft)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so its step can be saved again; returns where it is."""
    number, target = 1, folder.with_name(folder.name + DAMAGED)
    while os.path.lexists(target):
        number += 1
        target = folder.with_name(f"{folder.name}{DAMAGED}-{number}")
    folder.rename(target)
    sync(folder.parent)
    return target


def damaged_in(folder: Path) -> list[str]:
    """Names of the checkpoints in `folder` that were moved aside, oldest step first."""
    found = [path.name for path in folder.glob(f"step-*{DAMAGED}*") if path.is_dir()]
    return sorted(name for name in found if is_step_name(name.partition(DAMAGED)[0]))


def remove_drafts(folder: Path, names: Iterable[str] = ("*",)) -> None:
    """Remove what writers that were killed have left of files and folders; nobody may be writing these.

    `names` are patterns of what they were to become.
    """
    for draft in [path for name in names for path in folder.glob(f".{name}.*.tmp")]:
        if DRAFT.fullmatch(draft.name) and draft.is_dir() and not draft.is_symlink():
            shutil.rmtree(draft, ignore_errors=True)
        elif DRAFT.fullmatch(draft.name):
            with suppress(OSError):  # what cannot be removed is in nobody's way
                draft.unlink()


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for a writer
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
