"""Files that cost time to make and are made once: trained tokenizers, tokenised corpora.

A file is written under a temporary name and moved into place, so no reader ever sees half of one, and
processes or jobs that build at the same time do so side by side (what they build is the same). A manifest
beside it holds size and digest; a file that does not match is built again, with a line in the log.
`run_on_each_node_first` lets one process a node do the work, and carries errors to all of them, so that none
waits for a process that is gone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megalowbit.distributed.process_group import identify, is_initialized, is_true_anywhere, world_size
from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

BLOCK_BYTES = 256 * 1024
NUM_BLOCKS = 256  # files up to 64 MiB are read whole


def content_digest(path: Path) -> str:
    """SHA-256 over the size of a file and its content, of which 256 evenly spaced blocks if it is large.

    A corpus of hundreds of gigabytes is thus identified in a second, and the same after copying it elsewhere.
    A change in place that keeps the size of a file over 64 MiB and touches none of the blocks is not noticed.
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
    """Return `path`, made by `build` unless it already exists undamaged.

    Args:
        path: the final name; its folder is created.
        build: writes the file under the temporary name it is given; must write the same bytes every time.
            An `OSError` of it is taken for one of writing, so what it reads must report its own, as every
            `Corpus` does.

    Raises:
        UserError: the cache folder cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        if path.is_dir():
            raise UserError(f"{path} in the cache is a folder where a file belongs: remove it")
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
            "set data.cache_dir or MEGALOWBIT_CACHE to one with room"
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
        return  # another process was quicker, and may be reading its file already
    facts = {"size": draft.stat().st_size, "digest": content_digest(draft)}
    with atomic_file(_manifest(path)) as note:
        json.dump(facts, note)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)


def run_on_each_node_first(work: Callable[[], Result], fingerprint: Callable[[Result], str]) -> Result:
    """Run `work` on one process of each node, then on the others, which find its files in the cache.

    Collective where a process group exists; otherwise just `work()`. If it fails anywhere, it raises
    everywhere.

    Args:
        work: called exactly once in every process; makes no collective calls itself.
        fingerprint: identifies a result; all ranks must have the same.

    Raises:
        UserError: `work` raised one on some rank, or the ranks' results differ.
        RuntimeError: `work` raised anything else on another rank (the rank itself raises the original).
    """
    if not is_initialized():
        return work()
    is_first = identify().local_rank == 0
    results: list[Result] = []
    for is_my_turn in (is_first, not is_first):
        failure: Exception | None = None
        if is_my_turn:
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
    mine = None if failure is None else (isinstance(failure, UserError), str(failure), repr(failure))
    everyones: list[tuple[bool, str, str] | None] = [None] * world_size()
    dist.all_gather_object(everyones, mine)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(everyones):
        if theirs is not None:
            is_user_error, message, description = theirs
            raise UserError(message) if is_user_error else RuntimeError(f"rank {rank} failed: {description}")


def _compare_everywhere(mine: str) -> None:
    everyones: list[str] = [""] * world_size()
    dist.all_gather_object(everyones, mine)
    odd = [rank for rank, theirs in enumerate(everyones) if theirs != everyones[0]]
    if odd:
        raise UserError(
            f"rank {odd[0]} reads other data than rank 0 ({everyones[odd[0]]} instead of {everyones[0]}): "
            "give all nodes the same corpus, tokenizer and Python version"
        )
