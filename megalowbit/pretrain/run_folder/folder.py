"""The run folder: how it is chosen and locked, and the paths inside it.

Existing files are never overwritten. If the default folder of a new run is taken, the run gets the next
number (`runs/gpt2`, `runs/gpt2-2`, …). A folder that the user names must be empty or absent, unless the run
is resumed. Creating the folder claims it, and the main process holds its lock until it ends. Two jobs
therefore never write into the same folder. A start that fails leaves no folder behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

from megalowbit.durable_files import atomic_file, open_regular, remove_drafts, sync
from megalowbit.errors import TransientError, UserError, file_system_error, shown
from megalowbit.json_text import read_json_object
from megalowbit.pretrain.components.registry import COMPONENTS
from megalowbit.records.files import CONFIG, DONE, METRICS, REPORT, SAVED, SUMMARY
from megalowbit.values import BLOCK

LOCK = ".lock"
MAX_LOCK_BYTES = 4096  # a larger file belongs to another program and must not be truncated
ATTEMPT_VARIABLE = "MEGALOWBIT_TRY"  # set by the job script to the name of the attempt
RECORDS = (METRICS, *(name for component in COMPONENTS for name in component.records))
# `--restart` moves a run to before-restart-<n>; the name ends in .moving until everything has been moved.
EXPORT = re.compile(r"hf(?:-step-(\d+).*)?")  # an earlier one has its step, perhaps with a number after it
ASIDE_PREFIX, MOVING_SUFFIX = "before-restart", ".moving"
# These are written as drafts, which a kill can leave behind. Drafts of other files are not ours to remove.
DRAFT_NAMES = ("hf", CONFIG, SAVED, SUMMARY, DONE, REPORT, "*.jsonl")


def run_folder_of(path: Path) -> Path | None:
    """The folder of the run that `path` is, or is in; None: there is no run.

    Raises:
        UserError: `path` has a configuration that cannot be read; folders above it may hold anything.
    """
    for folder in (path, path.parent, path.parent.parent):
        config = folder / CONFIG
        with suppress(UserError) if folder != path else nullcontext():
            if config.is_file() and BLOCK in read_json_object(config):
                return folder
    return None


def exported_step(path: Path) -> int | None:
    """Optimizer steps of the run's export in `path`, which the run or its continuation has named; None: none.

    Raises:
        UserError: the run's configuration cannot be read.
    """
    run, named = run_folder_of(path), EXPORT.fullmatch(path.name)
    if run is None or run != path.parent or named is None:
        return None
    if named[1] is not None:
        return int(named[1])
    steps: int | None = read_json_object(run / CONFIG)[BLOCK].get("run", {}).get("steps")
    return steps  # the export is written at the end


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run folder; `is_new` if this process has just created it."""

    path: Path
    is_new: bool = False

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / CONFIG

    @property
    def checkpoints(self) -> Path:
        """Training checkpoints, `step-00000040/` and so on."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer as a Hugging Face folder; exporting a checkpoint needs it."""
        return self.path / "tokenizer"

    @property
    def hf(self) -> Path:
        """The final model as a Hugging Face checkpoint."""
        return self.path / "hf"

    @property
    def summary(self) -> Path:
        """The summary written at the end of the run."""
        return self.path / SUMMARY

    @property
    def done(self) -> Path:
        """Marks a finished run, whatever exit code its launcher returns."""
        return self.path / DONE

    def sync_records(self) -> None:
        """Flush all records to disk with fsync; written lines may still be in the system's cache."""
        for path in self.path.glob("*.jsonl"):
            sync(path)

    def mark_done(self, step: int) -> None:
        """Mark the run as finished; this is the last file a run writes."""
        try:
            with atomic_file(self.done) as file:
                file.write(json.dumps({"step": step}) + "\n")
        except OSError as error:
            message = (
                f"{self.done} cannot be written ({error.strerror}): free space, then start again with "
                "--resume auto; everything else has been written"
            )
            raise file_system_error(message, error) from error

    def has_summary_of(self, step: int) -> bool:
        """Whether there is a summary of a run that ended after this step."""
        try:
            return bool(read_json_object(self.summary).get("steps") == step)
        except UserError:  # no summary, or not one that a run has written
            return False

    @property
    def saved(self) -> Path:
        """Records the first complete checkpoint; kept outside `checkpoints/`, which may be removed."""
        return self.path / SAVED

    def first_saved_step(self) -> int | None:
        """The first step with a complete checkpoint according to `saved.json`; `None` if there was none.

        Raises:
            UserError: `saved.json` is damaged.
        """
        if not os.path.lexists(self.saved):
            return None
        step = read_json_object(self.saved).get("step", "")
        if not (step is None or type(step) is int):
            raise UserError(f"{self.saved} is damaged: its step is {shown(step)}, not a number or null")
        return step

    def note_saved(self, step: int | None) -> None:
        """Record the first complete checkpoint; pass `None` at the start of a run. Later calls do nothing.

        Raises:
            OSError: `saved.json` cannot be written.
        """
        try:
            is_noted = os.path.lexists(self.saved) and (step is None or self.first_saved_step() is not None)
        except UserError:
            is_noted = False  # damaged: write it again
        if not is_noted:
            with atomic_file(self.saved) as file:
                file.write(json.dumps({"step": step}) + "\n")

    @property
    def interrupted_restart(self) -> Path | None:
        """The folder to which a killed `--restart` moved part of the run; `None` if there is none."""
        found = sorted(self.path.glob(f"{ASIDE_PREFIX}-*{MOVING_SUFFIX}"))
        return found[0] if found else None

    def rename_records(self) -> list[str]:
        """Rename the records of an attempt that died before its first checkpoint; returns their new names.

        Raises:
            UserError: a file cannot be renamed.
        """
        renamed = []
        for path in (self.path / name for name in RECORDS):
            try:
                if not path.is_file() or not path.stat().st_size:
                    continue
                target = first_free(path.with_name(f"{path.name}.{number}") for number in count(1))
                path.rename(target)
            except OSError as error:
                message = f"{path} cannot be renamed ({error.strerror}): make {self.path} writable"
                raise file_system_error(message, error) from error
            renamed.append(target.name)
        return renamed

    def rename_export(self, step: int) -> None:
        """Rename the export of an earlier end of this run, because it is older than the weights now."""
        if self.hf.exists():
            self.hf.rename(first_free(numbered(self.path / f"hf-step-{step:08d}")))

    @property
    def is_started(self) -> bool:
        """Whether a run in this folder has opened its records."""
        return self.config.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder while the block runs; afterwards remove it if nothing was written.

        Raises:
            TransientError: another job holds the lock.
            UserError: the lock is a link, is not a regular file, was not written by a run or cannot be
                opened.
        """
        lock = self.path / LOCK
        with _open_lock(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TransientError(  # a file system may keep the lock of a dead node for a while
                    f"run folder {self.path} is in use by another job: wait for it, or use another --run-dir"
                ) from None
            try:
                self._sign(file)
                remove_drafts(self.path, DRAFT_NAMES)
                remove_drafts(self.checkpoints)  # a kill can interrupt the removal of an older checkpoint
                yield
            finally:
                if self.is_new and not has_content(self.path):
                    lock.unlink()
                    self.path.rmdir()

    def _sign(self, lock: IO[str]) -> None:
        """Write the attempt's name into the lock; a job script counts only its own run's checkpoints."""
        name = os.environ.get(ATTEMPT_VARIABLE, "no job script")
        try:  # unbuffered: a buffered write that fails would fail again when the file is closed
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"{name}\n".encode())
        except OSError as error:
            message = f"{self.path / LOCK} cannot be written ({error.strerror}): free space or fix the disk"
            raise file_system_error(message, error) from error

    def write_config(self, resolved: dict[str, Any]) -> None:
        """Save the resolved configuration atomically."""
        with atomic_file(self.config) as file:
            file.write(json.dumps(resolved, indent=2) + "\n")


def numbered(path: Path) -> Iterator[Path]:
    """`x`, `x-2`, `x-3` and so on."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


def first_free(paths: Iterable[Path]) -> Path:
    """The first path that does not exist, not even as a dangling link."""
    return next(path for path in paths if not os.path.lexists(path))


def _open_lock(lock: Path) -> IO[str]:
    try:
        file = open_regular(lock, "a")
    except OSError as error:
        message = (
            f"{lock} cannot be opened ({error.strerror}): make the folder writable, or use another --run-dir"
        )
        raise file_system_error(message, error) from error
    if os.fstat(file.fileno()).st_size > MAX_LOCK_BYTES:
        file.close()
        raise UserError(f"{lock} was not written by a run: move it away, or use another --run-dir")
    return file


def claim(
    stem: str,
    *,
    run_dir: Path | None,
    is_resume: bool,
    is_restart: bool = False,
    root: Path = Path("runs"),
) -> RunFolder:
    """Choose and create the run folder: `run_dir`, or a default folder below `root` named after `stem`.

    With `is_resume`, the folder may hold a run, which is then continued. With `is_restart`, a run in
    `run_dir` is moved aside later.

    Raises:
        UserError: `run_dir` is not empty and the run is not resumed, or the folder cannot be created.
    """
    name = str(run_dir or root / stem)
    try:
        name.encode()
    except UnicodeEncodeError:  # libraries that write there accept UTF-8 names only
        raise UserError(f"run folder {shown(name)} is not UTF-8: choose another --run-dir") from None
    try:
        if run_dir is not None:
            return _claim_named(run_dir, is_resume or is_restart)
        return _claim_numbered(root, stem, is_resume)
    except OSError as error:
        folder = run_dir or root / stem
        message = f"run folder {folder} cannot be created ({error.strerror}): choose another --run-dir"
        raise file_system_error(message, error) from error


def has_content(folder: Path) -> bool:
    """Whether `folder` contains anything other than a lock."""
    return any(path.name != LOCK for path in folder.iterdir())


def _claim_named(run_dir: Path, may_have_content: bool) -> RunFolder:
    if run_dir.is_dir() and has_content(run_dir) and not may_have_content:
        raise UserError(
            f"run folder {run_dir} is not empty: continue it with --resume auto, choose another --run-dir, "
            "or start over in it with --restart"
        )
    is_new = not run_dir.exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    return RunFolder(run_dir, is_new)


def _claim_numbered(root: Path, stem: str, is_resume: bool) -> RunFolder:
    root.mkdir(parents=True, exist_ok=True)
    taken = _numbers_taken(root, stem)
    begun = [number for number in taken if _holds_run(_numbered(root, stem, number))]
    if is_resume and begun:
        newest = _numbered(root, stem, max(begun))
        if not newest.exists():
            raise UserError(
                f"{newest} is a link to {shown(str(newest.readlink()))}, which does not exist: put "
                "it back to continue, or name a --run-dir"
            )
        return RunFolder(newest)
    number = max(taken, default=0) + 1
    while True:
        folder = _numbered(root, stem, number)
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1  # another job created it after we listed the folder
        else:
            return RunFolder(folder, is_new=True)


def _holds_run(folder: Path) -> bool:
    """Whether a folder holds a run that can be continued, or would if missing files were put back."""
    names = (folder / CONFIG, folder / SAVED, folder / "checkpoints")
    return any(map(os.path.lexists, names)) or (folder.is_symlink() and not folder.exists())


def _numbered(root: Path, stem: str, number: int) -> Path:
    return root / (stem if number == 1 else f"{stem}-{number}")


def _numbers_taken(root: Path, stem: str) -> list[int]:
    pattern = re.compile(re.escape(stem) + r"(?:-(\d+))?")
    matches = [pattern.fullmatch(path.name) for path in root.iterdir()]
    return [int(match.group(1) or 1) for match in matches if match]
