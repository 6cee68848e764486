"""Digests of files: of cached ones, and of corpora, which name what is cached of them.

Content alone decides about a digest. Of a large file only evenly spaced blocks are read, and of a corpus at
most 1 GiB. `corpus_digests` remembers its results in the cache, and says which changes are not detected.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError
from megalowbit.json_text import parse_json

logger = logging.getLogger(__name__)

BLOCK_BYTES = 256 * 1024
NUM_BLOCKS = 256  # files up to 64 MiB are read completely
TOTAL_BLOCKS = 4096  # of a corpus: 1 GiB
FEWEST_BLOCKS = 4  # of a file
NS_UNTIL_SETTLED = 2 * 10**9  # times in file systems may be as coarse as 2 s


def digest_of(parts: object) -> str:
    """SHA-256 of values of plain types: it is equal in all processes and runs if the values are."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def key_of(parts: object) -> str:
    """The first 128 bits of `digest_of`: a short name of what is made of these values."""
    return digest_of(parts)[:32]


def content_digest(path: Path, blocks: int = NUM_BLOCKS, block: int = BLOCK_BYTES) -> str:
    """SHA-256 of a file's size and content; of a large file, only evenly spaced blocks with both ends.

    Args:
        path: the file.
        blocks: how many are read; a file of at most so many is read completely.
        block: bytes of each.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb", buffering=block) as file:  # reads no more than the blocks
        starts = list(range(0, size, block))
        if len(starts) > blocks:
            last = size - block
            starts = [last * number // (blocks - 1) for number in range(blocks)]
        for start in starts:
            file.seek(start)
            digest.update(file.read(block))
    return digest.hexdigest()


def corpus_digests(files: Sequence[Path], cache_dir: Path | None = None) -> list[str]:
    """The `content_digest` of each file of a corpus; at most 1 GiB is read in all, however many there are.

    Content alone decides about a digest, so copies and touched files have the same. If the files have more
    than 1 GiB, counting at most 64 MiB of each, all get equal parts of it, in at least four blocks.

    `cache_dir/digests` remembers the digests with size, inode, and times of change of each file. While these
    stay, files are not read again, by any rank or run. What is remembered is not needed: it may be removed,
    damaged, or impossible to write.

    Not detected: a change of a file that is not read completely, if it keeps the size and affects none of the
    blocks. If the time of such a file has changed, but neither its inode nor its digest, a warning says so.

    Args:
        files: of the corpus, in their order.
        cache_dir: folder of the cache; None: remember nothing.
    """
    facts = [file_facts(file) for file in files]
    blocks, block = _blocks_of(size for size, *_ in facts)
    names = [str(file.absolute()) for file in files]
    path = None if cache_dir is None else cache_dir / "digests" / f"{key_of(names)}.json"
    known = _Digests(path, [blocks, block])
    digests = []
    for file, name, each in zip(files, names, facts, strict=True):
        before, digest = known.entries.get(name, ([], ""))
        if before != each:
            found = content_digest(file, blocks, block)
            # another inode is another file: each node's own copy, under one name in a cache that they share
            is_same_file = digest == found and before[1] == each[1]
            if is_same_file and each[0] > blocks * block and before[2] != each[2]:
                logger.warning(
                    "%s has a new time, but its size and the %d blocks that are read are as before: if it "
                    "was edited, cached tokens and checkpoints are of the old content",
                    file,
                    blocks,
                )
            digest = found
            known.add(name, each, digest)
        digests.append(digest)
    known.save()
    return digests


def file_facts(file: Path) -> list[int]:
    """Size, inode and both times of change in ns: while these stay, so does the content of a settled file."""
    found = file.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def is_settled(facts: list[int]) -> bool:
    """Whether a file of these facts is so old that any change from now on gives it another time."""
    return time.time_ns() - max(facts[2:]) > NS_UNTIL_SETTLED


def is_in_future(facts: list[int]) -> bool:
    """Whether a file of these facts has a time that is still to come."""
    return max(facts[2:]) > time.time_ns() + NS_UNTIL_SETTLED


def read_note(note: Path) -> str | None:
    """What a note in `cache_dir/digests` says; None: there is none that can be read."""
    try:
        return note.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def write_note(note: Path, content: str) -> str | None:
    """Write a note; return what prevents it."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(note) as file:
            file.write(content)
    except OSError as error:
        return f"{note} cannot be written ({error.strerror or error})"
    return None


def _blocks_of(sizes: Iterable[int]) -> tuple[int, int]:
    """How many blocks of each file are read, and their bytes."""
    counts = [min(NUM_BLOCKS, -(-size // BLOCK_BYTES)) for size in sizes]
    if sum(counts) <= TOTAL_BLOCKS:
        return NUM_BLOCKS, BLOCK_BYTES
    blocks = max(FEWEST_BLOCKS, TOTAL_BLOCKS // len(counts))
    return blocks, min(BLOCK_BYTES, max(2, TOTAL_BLOCKS * BLOCK_BYTES // (blocks * len(counts))))


class _Digests:
    """Digests of files with the facts for which they hold.

    Args:
        path: where they are; None: nowhere.
        rule: how they were made.

    Attributes:
        entries: facts and digest of each file, by its name.
    """

    def __init__(self, path: Path | None, rule: list[int]) -> None:
        self._path, self._rule = path, rule
        self.entries: dict[str, tuple[list[int], str]] = {}
        self._is_new = False
        if path is None or not path.exists():
            return
        try:
            found = parse_json(path.read_text(encoding="utf-8"), str(path))
            if found["rule"] == rule and found["check"] == key_of([repr(found["files"])]):
                self.entries = {name: (facts, digest) for name, (facts, digest) in found["files"].items()}
        except (UserError, OSError, ValueError, TypeError, KeyError) as error:
            logger.info("%s is damaged (%s): the corpus is read again", path, error)

    def add(self, name: str, facts: list[int], digest: str) -> None:
        """Note a digest, unless its file is so new that a change might keep its times."""
        self.entries.pop(name, None)
        self._is_new = True
        if is_settled(facts):
            self.entries[name] = facts, digest

    def save(self) -> None:
        if self._path is None or not self._is_new or not self.entries:
            return
        files = {name: list(each) for name, each in self.entries.items()}
        content = {"rule": self._rule, "files": files, "check": key_of([repr(files)])}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self._path) as file:
                json.dump(content, file)
        except OSError as error:
            logger.info("%s cannot be written (%s): each start reads the corpus again", self._path, error)
