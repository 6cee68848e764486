"""Caches files that take long to build: trained tokenizers and tokenised corpora.

A file is written under a temporary name and then renamed, so readers never see an incomplete file. One
process builds it while others wait for a lock (`flock`, which NFS and Lustre support between nodes). On a
file system without locks several may build the same file, which is safe, because they produce the same
content. A manifest next to the file has its size and digest; a file that does not match is built again, and a
warning is logged. Of a file above 64 MiB, each start compares a sample, and all of it if its inode or time is
another than when all was compared last.
`run_on_each_node_first` runs the work on one process of each node and raises errors on all processes, so that
none waits for a process that has failed.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from megalowbit.durable_files import atomic_file, sync
from megalowbit.errors import TransientError, UserError
from megalowbit.json_text import parse_json, read_text

logger = logging.getLogger(__name__)


Result = TypeVar("Result")

BLOCK_BYTES = 256 * 1024
NUM_BLOCKS = 256  # files up to 64 MiB are read completely
TOTAL_BLOCKS = 4096  # of a corpus: 1 GiB
FEWEST_BLOCKS = 4  # of a file
NS_UNTIL_SETTLED = 2 * 10**9  # times in file systems may be as coarse as 2 s
OF_MANIFEST = (
    "size",
    "digest",
    "whole",
    "inode",
    "mtime_ns",
)  # what a manifest says besides the facts of `build`
LARGEST_MANIFEST = 2**16  # bytes
WAIT_SECONDS = 3600.0
SECONDS_BETWEEN_TRIES = 0.5
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


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
    blocks. If the time of such a file has changed, and its digest has not, a warning says so.

    Args:
        files: of the corpus, in their order.
        cache_dir: folder of the cache; None: remember nothing.
    """
    facts = [file_facts(file) for file in files]
    blocks, block = _blocks_of(size for size, *_ in facts)
    names = [str(file.absolute()) for file in files]
    path = None if cache_dir is None else cache_dir / "digests" / f"{_key(names)}.json"
    known = _Digests(path, [blocks, block])
    digests = []
    for file, name, each in zip(files, names, facts, strict=True):
        before, digest = known.entries.get(name, ([], ""))
        if before != each:
            found = content_digest(file, blocks, block)
            if digest == found and each[0] > blocks * block and before[2] != each[2]:
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


def _blocks_of(sizes: Iterable[int]) -> tuple[int, int]:
    """How many blocks of each file are read, and their bytes."""
    counts = [min(NUM_BLOCKS, -(-size // BLOCK_BYTES)) for size in sizes]
    if sum(counts) <= TOTAL_BLOCKS:
        return NUM_BLOCKS, BLOCK_BYTES
    blocks = max(FEWEST_BLOCKS, TOTAL_BLOCKS // len(counts))
    return blocks, min(BLOCK_BYTES, max(2, TOTAL_BLOCKS * BLOCK_BYTES // (blocks * len(counts))))


def _key(names: Sequence[str]) -> str:
    return hashlib.sha256(repr(names).encode()).hexdigest()[:32]


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
            if found["rule"] == rule and found["check"] == _key([repr(found["files"])]):
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
        content = {"rule": self._rule, "files": files, "check": _key([repr(files)])}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self._path) as file:
                json.dump(content, file)
        except OSError as error:
            logger.info("%s cannot be written (%s): each start reads the corpus again", self._path, error)


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
        lock = _acquire(path, timeout)
        try:
            _build_once(path, build, has_lock=lock is not None)
        finally:
            if lock is not None:
                # before it is released, so that nobody gets the lock of a file that has lost its name
                _lock_of(path).unlink(missing_ok=True)
                lock.close()
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


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


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
    built = {"inode": found.st_ino, "mtime_ns": found.st_mtime_ns}
    if "whole" not in known or known.items() >= built.items():
        return True
    logger.info("%s was copied or touched: all of it is compared with its manifest, once", path)
    if known["whole"] != content_digest(path, blocks=sys.maxsize):
        return False
    try:
        _write_manifest(path, known | built)
    except OSError as error:
        logger.info("%s cannot be written (%s): each start compares again", _manifest(path), error)
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
        content |= {"inode": found.st_ino, "mtime_ns": found.st_mtime_ns}
    # The manifest first: a file without one would be built again, a manifest without a file is replaced.
    _write_manifest(path, content)
    draft.replace(path)
    sync(path.parent)


def _acquire(path: Path, timeout: float) -> IO[str] | None:
    """Wait until this process alone may build `path`; the lock is held until the returned file is closed.

    The kernel releases it when a process ends, however that happens. None if the file system has no locks.

    Raises:
        TransientError: another process still holds it after `timeout` seconds.
    """
    lock, end, is_logged = _lock_of(path), time.monotonic() + timeout, False
    while True:
        file = lock.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno in NO_LOCKS:
                logger.warning("%s has no file locks: processes that need it may all build %s", lock, path)
                return None
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if time.monotonic() >= end:
                raise TransientError(
                    f"{path} is still being built by {_holder(lock)} after {timeout:g} s: raise "
                    "data.build_timeout, or build it beforehand with --prepare-data"
                ) from None
            if not is_logged:
                logger.info("waiting for %s, which %s builds, for at most %g s", path, _holder(lock), timeout)
                is_logged = True
            time.sleep(min(SECONDS_BETWEEN_TRIES, max(0.0, end - time.monotonic())))
            continue
        if _is_same(file, lock):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            return file
        file.close()  # its owner has removed it since it was opened


def _holder(lock: Path) -> str:
    try:
        return lock.read_text(encoding="utf-8") or "another process"
    except OSError:  # just removed
        return "another process"


def _is_same(file: IO[str], path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(file.fileno())
    return (own.st_ino, own.st_dev) == (found.st_ino, found.st_dev)


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
    from megalowbit.distributed.process_group import identify, is_initialized  # torch: see below

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


# The functions that use collectives import torch themselves: processes that only tokenise start without it.


def _raise_everywhere(failure: Exception | None) -> None:
    from megalowbit.distributed.agreement import gather
    from megalowbit.distributed.process_group import is_true_anywhere

    if not is_true_anywhere(failure is not None):
        return
    kinds = [kind for kind in (TransientError, UserError) if isinstance(failure, kind)]
    local = None if failure is None else ([kind.__name__ for kind in kinds], str(failure), repr(failure))
    of_all_ranks = gather(local)
    if failure is not None:
        raise failure
    for rank, failed in enumerate(of_all_ranks):
        if failed is not None:
            names, message, description = failed
            if names:  # exit codes of ranks agree if the types do
                raise TransientError(message) if TransientError.__name__ in names else UserError(message)
            raise RuntimeError(f"rank {rank} failed: {description}")


def _compare_everywhere(fingerprint: str) -> None:
    from megalowbit.distributed.agreement import gather

    of_all_ranks = gather(fingerprint)
    different = [rank for rank, other in enumerate(of_all_ranks) if other != of_all_ranks[0]]
    if different:
        rank = different[0]
        raise UserError(
            f"rank {rank} reads other data than rank 0 ({of_all_ranks[rank]} instead of {of_all_ranks[0]}): "
            "use the same corpus, tokenizer and Python version on all nodes"
        )
