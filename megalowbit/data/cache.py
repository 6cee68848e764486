"""Caches files that take long to build: trained tokenizers and tokenised corpora.

A file is written under a temporary name and then renamed, so readers never see an incomplete file. Processes
or jobs may build the same file at the same time, because they produce the same content. A manifest next to
the file has its size and digest; a file that does not match is built again, and a warning is logged.
`run_on_each_node_first` runs the work on one process of each node and raises errors on all processes, so that
none waits for a process that has failed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from megalowbit.distributed.agreement import gather
from megalowbit.distributed.process_group import identify, is_initialized, is_true_anywhere
from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object

logger = logging.getLogger(__name__)


Result = TypeVar("Result")

BLOCK_BYTES = 256 * 1024
NUM_BLOCKS = 256  # files up to 64 MiB are read completely


class _Lines(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        self._say(("WARNING: " if is_warning else "data      ") + record.getMessage())


@contextmanager
def reported_builds(say: Callable[[str], None]) -> Iterator[None]:
    """Pass what the package logs meanwhile to `say`: the first use of a corpus may take minutes."""
    package, handler = logging.getLogger(__package__), _Lines(say)
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)


def content_digest(path: Path) -> str:
    """SHA-256 of a file's size and content; of a large file, only 256 evenly spaced blocks are read.

    This identifies a corpus of hundreds of gigabytes within a second, also after it has been copied. Not
    detected: a change in a file over 64 MiB that keeps its size and affects none of the blocks.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        starts = list(range(0, size, BLOCK_BYTES))
        if len(starts) > NUM_BLOCKS:
            last = size - BLOCK_BYTES
            starts = [last * number // (NUM_BLOCKS - 1) for number in range(NUM_BLOCKS)]
        for start in starts:
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def cached_file(path: Path, build: Callable[[Path], None]) -> Path:
    """Return `path`; call `build` first if the file does not exist or is damaged.

    Args:
        path: the final name; its folder is created.
        build: writes the file to the temporary path that it is given; must write the same bytes every time.
            An `OSError` raised by it is reported as an error of the cache folder, so `build` must report
            errors of reading in another way, as every `Corpus` does.

    Raises:
        UserError: the cache folder cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        if path.is_dir():
            raise UserError(f"{path} in the cache is a folder and should be a file: remove it")
        if path.exists():
            if _is_whole(path):
                return path
            logger.warning("%s is damaged (it does not match its manifest): building it again", path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            build(draft)
            _move_into_place(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cache folder {path.parent} cannot be written ({error.strerror or error}): "
            "set data.cache_dir or MEGALOWBIT_CACHE to a writable folder with free space"
        ) from error
    return path


def _manifest(path: Path) -> Path:
    return path.with_name(path.name + ".manifest.json")


def _is_whole(path: Path) -> bool:
    try:
        known = read_json_object(_manifest(path))
    except UserError:
        return False
    return known == {"size": path.stat().st_size, "digest": content_digest(path)}


def _move_into_place(draft: Path, path: Path) -> None:
    if path.exists() and _is_whole(path):
        return  # another process has finished first, and may be reading its file already
    facts = {"size": draft.stat().st_size, "digest": content_digest(draft)}
    with atomic_file(_manifest(path)) as note:
        json.dump(facts, note)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)


def run_on_each_node_first(work: Callable[[], Result], fingerprint: Callable[[Result], str]) -> Result:
    """Run `work` on one process of each node, then on the others, which find the files in the cache.

    Collective if there is a process group; otherwise it only calls `work()`. If `work` fails on one rank, all
    ranks raise an error.

    Args:
        work: called exactly once in each process; must not call collectives.
        fingerprint: identifies a result; must be equal on all ranks.

    Raises:
        UserError: `work` raised a `UserError` on some rank, or the results of ranks differ.
        RuntimeError: `work` raised another error on another rank (that rank raises the original error).
    """
    if not is_initialized():
        return work()
    is_first = identify().local_rank == 0
    results: list[Result] = []
    for is_local_turn in (is_first, not is_first):
        failure: Exception | None = None
        if is_local_turn:
            try:
                results.append(work())
            except Exception as error:
                failure = error
        _raise_everywhere(failure)
    _compare_everywhere(fingerprint(results[0]))
    return results[0]


def _raise_everywhere(failure: Exception | None) -> None:
    if not is_true_anywhere(failure is not None):
        return
    local = None if failure is None else (isinstance(failure, UserError), str(failure), repr(failure))
    of_all_ranks = gather(local)
    if failure is not None:
        raise failure
    for rank, failed in enumerate(of_all_ranks):
        if failed is not None:
            is_user_error, message, description = failed
            raise UserError(message) if is_user_error else RuntimeError(f"rank {rank} failed: {description}")


def _compare_everywhere(fingerprint: str) -> None:
    of_all_ranks = gather(fingerprint)
    different = [rank for rank, other in enumerate(of_all_ranks) if other != of_all_ranks[0]]
    if different:
        rank = different[0]
        raise UserError(
            f"rank {rank} reads other data than rank 0 ({of_all_ranks[rank]} instead of {of_all_ranks[0]}): "
            "use the same corpus, tokenizer and Python version on all nodes"
        )
