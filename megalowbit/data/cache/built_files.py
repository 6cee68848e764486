"""Caches files that take long to build: trained tokenizers, tokenised corpora, plans of packing.

A file is written under a temporary name and then renamed, so readers never see an incomplete file. One
process builds it while others wait for a lock (`build_lock`). On a file system without locks several may
build the same file, which is safe, because they produce the same content. A manifest next to the file has its
size and digest; a file that does not match is built again, and a warning is logged. Of a file above 64 MiB,
each start compares a sample, and all of it if its time is another than when all was compared last.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalowbit.data.cache.build_lock import build_lock
from megalowbit.data.cache.digests import BLOCK_BYTES, NUM_BLOCKS, content_digest
from megalowbit.durable_files import atomic_file, sync
from megalowbit.errors import UserError
from megalowbit.json_text import parse_json, read_text

logger = logging.getLogger(__name__)

# What a manifest says besides the facts of `build`; "inode" is of earlier versions.
OF_MANIFEST = ("size", "digest", "whole", "inode", "mtime_ns")
LARGEST_MANIFEST = 2**16  # bytes
WAIT_SECONDS = 3600.0


def cached_file(
    path: Path,
    build: Callable[[Path], dict[str, int] | None],
    *,
    timeout: float = WAIT_SECONDS,
) -> Path:
    """Return `path`; call `build` first if the file does not exist or is damaged.

    One process builds, and others wait, also on other nodes with a shared folder. If the builder is killed,
    one of those that wait takes its place.

    Args:
        path: the final name; its folder is created.
        build: writes the file to the temporary path that it is given; must write the same bytes every time.
            It may return numbers for the manifest (`facts_of`). To continue after a kill, it keeps a journal
            (`journal_of`) next to that path, which is then the same at the next call. An `OSError` raised by
            it is reported as an error of the cache folder, so `build` must report errors of reading in
            another way, as every `Corpus` does.
        timeout: seconds to wait for another process that builds the file.

    Raises:
        UserError: the cache folder cannot be written.
        TransientError: another process was still building after `timeout`.
    """
    try:
        if path.is_dir():
            raise UserError(f"{path} in the cache is a folder and should be a file: remove it")
        if path.exists() and _is_whole(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with build_lock(path, timeout) as has_lock:
            _build_once(path, build, has_lock=has_lock)
    except OSError as error:
        raise UserError(
            f"cache folder {path.parent} cannot be written ({error.strerror or error}): "
            "set data.cache_dir or MEGALOWBIT_CACHE to a writable folder with free space"
        ) from error
    return path


def _build_once(path: Path, build: Callable[[Path], dict[str, int] | None], *, has_lock: bool) -> None:
    if path.exists():  # another process may have built it in the meantime
        if _is_whole(path):
            return
        logger.warning("%s is damaged (it does not match its manifest): building it again", path)
    # without a lock, several processes may build, and each needs a name of its own
    unique = "partial" if has_lock else f"{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
    draft = path.with_name(f".{path.name}.{unique}")
    journal = journal_of(draft)
    try:
        _move_into_place(draft, path, build(draft) or {})
        journal.unlink(missing_ok=True)
    finally:
        is_kept = has_lock and journal.exists()
        for left in [*([] if is_kept else [draft, journal]), *(_left_by_kills(path) if has_lock else [])]:
            left.unlink(missing_ok=True)


def _left_by_kills(path: Path) -> list[Path]:
    """What `atomic_file` has not renamed of manifests and journals; who has the lock may remove it."""
    name = glob.escape(path.name)
    return [left for pattern in (f".{name}.*.tmp", f"..{name}.*.tmp") for left in path.parent.glob(pattern)]


def journal_of(draft: Path) -> Path:
    """Where `build` notes how far it has written `draft`; while it exists, the draft is kept."""
    return draft.with_name(f"{draft.name}.json")


def facts_of(path: Path) -> dict[str, Any]:
    """What `build` has returned for a file that `cached_file` has built; older files have nothing."""
    return {key: value for key, value in _read_manifest(path).items() if key not in OF_MANIFEST}


def _manifest(path: Path) -> Path:
    return path.with_name(path.name + ".manifest.json")


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = _manifest(path)
    found = parse_json(read_text(manifest, largest=LARGEST_MANIFEST), str(manifest))
    return found if isinstance(found, dict) else {}


def _is_whole(path: Path) -> bool:
    try:
        known = _read_manifest(path)
    except (UserError, OSError):
        return False
    facts = [value for key, value in known.items() if key not in OF_MANIFEST]
    if not all(type(value) is int and value >= 0 for value in facts):
        return False
    found = path.stat()
    if (known.get("size"), known.get("digest")) != (found.st_size, content_digest(path)):
        return False
    if "whole" not in known or known.get("mtime_ns") == found.st_mtime_ns:
        return True
    if not _is_noted(path, known):  # before a long reading whose result could not be noted
        return True
    logger.info(
        "%s was copied or touched: all of it is compared with its manifest, once; if that takes long, "
        "run --prepare-data before the job",
        path,
    )
    if known["whole"] != content_digest(path, blocks=sys.maxsize):
        return False
    _is_noted(path, known | {"mtime_ns": found.st_mtime_ns})
    return True


def _is_noted(path: Path, content: dict[str, Any]) -> bool:
    """Write the manifest of a copied file; warn if that is not possible."""
    try:
        _write_manifest(path, content)
    except OSError as error:
        logger.warning(
            "%s was copied or touched, and starts compare only a sample of it, because %s cannot be written "
            "(%s)",
            path,
            _manifest(path),
            error.strerror or error,
        )
        return False
    return True


def _write_manifest(path: Path, content: dict[str, Any]) -> None:
    with atomic_file(_manifest(path)) as note:
        json.dump(content, note)


def _move_into_place(draft: Path, path: Path, facts: dict[str, int]) -> None:
    if path.exists() and _is_whole(path):
        return  # without a lock, another process has finished first, and may be reading its file already
    with draft.open("rb+") as file:
        os.fsync(file.fileno())
    found = draft.stat()
    content: dict[str, Any] = {"size": found.st_size, "digest": content_digest(draft), **facts}
    if found.st_size > NUM_BLOCKS * BLOCK_BYTES:  # the digest is of a sample
        content |= {"whole": content_digest(draft, blocks=sys.maxsize)}
        content |= {"mtime_ns": found.st_mtime_ns}
    # The manifest first: a file without one would be built again, a manifest without a file is replaced.
    _write_manifest(path, content)
    draft.replace(path)
    sync(path.parent)
