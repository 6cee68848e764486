"""Local text: `.txt`, `.jsonl`, `.parquet` and `.arrow` files, or a folder or a glob of them.

A document is a `.txt` file, a line of a `.jsonl` file or a row of a `.parquet` or `.arrow` file. `.txt` and
`.jsonl` may be compressed (`.gz`, `.zst`). `lines` and `tables` read them.

Text must be valid UTF-8. A byte, line or field that is not is a bad record: it stops the run with an error
that names file and line, because nobody would notice silently missing text, unless `max_bad_records` allows
leaving it out. Blank lines and empty texts within a file are not documents.

Of the `.arrow` files in a folder that datasets' `save_to_disk` has written, only those of the data set are
read: beside them are caches of `map` and `filter`, and shards of an earlier data set.

A file that is edited between fingerprint and the end of reading is an error: otherwise the cache would keep
its tokens under the fingerprint of the content before.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cached_property, lru_cache
from pathlib import Path

from megalowbit.data.cache.digests import corpus_digests, file_facts, is_settled
from megalowbit.data.corpus import BadRecords, Corpus, CorpusChangedError
from megalowbit.data.settings import (
    COMPRESSIONS,
    GLOB,
    TEXT_KINDS,
    DataSettings,
    compression_of,
    kind_of,
)
from megalowbit.data.text_files.lines import TextFile, jsonl_documents, text_documents
from megalowbit.data.text_files.tables import arrow_documents, parquet_documents
from megalowbit.errors import UserError

logger = logging.getLogger(__name__)

ANY_FOLDERS = "**"  # in a glob
DATASET_STATE = "state.json"  # what `save_to_disk` of the datasets library writes
ARROW = ".arrow"
CACHES = f"cache-*{ARROW}"  # of its `map` and `filter`
READERS: dict[str, Callable[[TextFile], Iterator[str]]] = {
    ".txt": text_documents,
    ".jsonl": jsonl_documents,
    ".parquet": parquet_documents,
    ARROW: arrow_documents,
}


class LocalCorpus(Corpus):
    """A file, or all text files below a folder or that match a glob, in the order of their paths.

    A file with several names (links, hard links) is read once, under the first of them. Links to folders are
    followed only where a glob names them, not below a folder and not by `**`.

    Args:
        path: the file, folder or glob (`shards/*.jsonl.zst`, `**` for any folders).
        text_field: the field (jsonl) or column (parquet, arrow) with the text.
        max_bad_records: how many records may be left out because they are not text.
        cache_dir: where digests of the files are remembered; None: nowhere.

    Files without text are left out of a folder and of a glob.

    Raises:
        UserError: the path does not exist, there are no text files, or one cannot be read; a single file is
            of another kind, or all files are empty.
    """

    def __init__(
        self,
        path: Path,
        *,
        text_field: str = "text",
        max_bad_records: int = 0,
        cache_dir: Path | None = None,
    ) -> None:
        self.path = path
        self._cache_dir = cache_dir
        self.text_field = text_field
        self.bad_records = BadRecords(max_bad_records)
        self.files = tuple(_with_content(path, _find_files(path, text_field)))
        self._reading: TextFile | None = None
        self._bytes_done = 0
        self._facts: dict[Path, list[int]] = {}  # at the fingerprint
        self._are_settled = True

    @classmethod
    def is_meant(cls, corpus: str) -> bool:
        return GLOB.search(corpus) is not None or Path(corpus).expanduser().exists()

    @classmethod
    def open(cls, settings: DataSettings) -> LocalCorpus:
        return cls(
            Path(settings.corpus).expanduser(),
            text_field=settings.text_field,
            max_bad_records=settings.max_bad_records,
            cache_dir=settings.cache_dir,
        )

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def share_read(self) -> float:
        return (self._bytes_done + (self._reading.bytes_read if self._reading else 0)) / self._num_bytes

    @property
    def place(self) -> str | None:
        return None if self._reading is None else self._reading.place

    @cached_property
    def _num_bytes(self) -> int:
        with _naming_files(self.path):
            return max(1, sum(file.stat().st_size for file in self.files))

    @cached_property
    def fingerprint(self) -> str:  # it may read the files
        digest = hashlib.sha256(f"files {self.text_field!r}".encode())
        root = _root(self.path)
        with _naming_files(self.path):
            self._facts = {file: file_facts(file) for file in self.files}  # before their contents
        self._are_settled = all(map(is_settled, self._facts.values()))
        for file, content in zip(self.files, self._digests, strict=True):
            relative = _suffixes(file) if root is None else file.relative_to(root).as_posix()
            digest.update(f"{relative}\0{content}\0".encode())
        return digest.hexdigest()

    @cached_property
    def _digests(self) -> list[str]:
        return self._read_digests()

    def _read_digests(self) -> list[str]:
        with _naming_files(self.path):
            return corpus_digests(self.files, self._cache_dir)

    def check_unchanged(self) -> None:
        if self._reading is None or self._reading.path not in self._facts:
            return
        file = self._reading.path
        with _naming_files(self.path):
            now = file_facts(file)
        (size, _, mtime, _), before = now, self._facts[file]
        if now == before:
            return
        # links, permissions and copies to another place change the inode or the time of its change alone
        number = self.files.index(file)
        if (size, mtime) != (before[0], before[2]) or self._digests[number] != self._read_digests()[number]:
            raise _changed(file)
        self._facts[file] = now

    def _check_digests(self) -> None:
        """Find edits that have left the times of new files as they were at the fingerprint."""
        if self._are_settled:
            return
        for file, before, now in zip(self.files, self._digests, self._read_digests(), strict=True):
            if before != now:
                raise _changed(file)

    def documents(self) -> Iterator[str]:
        self.bad_records.reset()
        self._bytes_done = 0
        without_text = []
        for path in self.files:
            self._reading = file = TextFile(path, self.text_field, self.bad_records)
            is_empty, bad_before = True, self.bad_records.count
            try:
                for document in READERS[kind_of(path) or ""](file):
                    is_empty = False
                    yield document
            # from reading, because the consumer cannot raise here; the last two are a damaged .gz file's
            except (OSError, EOFError, zlib.error) as error:
                raise _unreadable(path, error) from error
            self.check_unchanged()
            if is_empty and self.bad_records.count == bad_before:
                without_text.append(path)
            self._reading = None
            self._bytes_done += file.size
        self._check_digests()
        _leave_out(self.path, self.files, without_text, "files without text")


def _suffixes(file: Path) -> str:
    """The suffixes that say how to read a file: `.txt`, `.jsonl.gz`."""
    return f"{kind_of(file)}{compression_of(file)}"


def _root(path: Path) -> Path | None:
    """The folder that contains all files of a folder or a glob; None for a single file."""
    if path.is_file():
        return None
    while GLOB.search(str(path)) and not path.exists():
        path = path.parent
    return path


def _find_files(path: Path, text_field: str) -> list[Path]:
    if path.is_file():
        if kind_of(path) is None:
            raise UserError(
                f"corpus file {path} has an unknown suffix: rename it to one of {', '.join(TEXT_KINDS)} "
                f"(the first two also with {' or '.join(COMPRESSIONS)})"
            )
        return [path]
    is_glob = GLOB.search(str(path)) is not None and not path.exists()
    if not is_glob and not path.exists():
        raise UserError(f"corpus {path} does not exist: name a file, a folder or a glob")
    if not is_glob and not path.is_dir():
        raise UserError(f"corpus {path} is a FIFO, a socket or a device: name a file or a folder")
    root = _root(path)
    assert root is not None
    found = list(_matches(path)) if is_glob else _files_below(path, text_field)
    if not (is_glob and path.name.startswith("cache-")):  # then caches are meant
        found = _without_leftovers(path, found)
    files = sorted(set(found), key=lambda file: file.relative_to(root).as_posix())
    if not files:
        place = f"glob {path} matches" if is_glob else f"folder {path} has"
        raise UserError(f"corpus {place} no {', '.join(TEXT_KINDS)} files: name another")
    for file in files:
        if not file.is_file():
            raise UserError(f"corpus file {file} is not a regular file, or is a dangling link: remove it")
    return _each_once(path, files)


def _each_once(path: Path, files: Sequence[Path]) -> list[Path]:
    """The files without further names, links or hard links, of those before them."""
    names: dict[tuple[int, int] | Path, Path] = {}
    further = []
    for file in files:
        with _naming_files(path):
            found = file.stat()
            # some network file systems give different files one inode number
            identity = (found.st_dev, found.st_ino) if found.st_nlink > 1 else file.resolve()
        first = names.setdefault(identity, file)
        if first is not file:
            further.append((file, first))
    if further:
        logger.warning(
            "corpus %s: each file is read once, under the first of its names; %d further names are passed "
            "over, such as %s for %s",
            path,
            len(further),
            *further[0],
        )
    return list(names.values())


def _matches(pattern: Path) -> Iterator[Path]:
    """The text files that match a glob; folders and files of other kinds are passed over.

    `**` does not follow links to folders, which may form loops; other parts of the pattern do.
    """
    parts = pattern.parts
    if ANY_FOLDERS in parts:
        place = parts.index(ANY_FOLDERS)
        rest = Path(*parts[place + 1 :]) if parts[place + 1 :] else Path("*")
        for start in glob.glob(str(Path(*parts[:place]))):  # noqa: PTH207 - the pattern may be absolute
            for folder, _ in _folders(Path(start)) if Path(start).is_dir() else ():
                yield from _matches(Path(glob.escape(str(folder))) / rest)
        return
    for name in glob.glob(str(pattern)):  # noqa: PTH207
        if kind_of(name) is not None and not Path(name).is_dir():
            yield Path(name)


def _files_below(path: Path, text_field: str) -> list[Path]:
    """All text files below a folder, except hidden ones; links to folders are not followed.

    Raises:
        UserError: all files are of other kinds.
    """
    files: list[Path] = []
    others: list[Path] = []
    for folder, names in _folders(path):
        for name in names:
            if not name.startswith("."):
                (others if kind_of(name) is None else files).append(folder / name)
    if others and not files:
        raise UserError(
            f"corpus folder {path} has no {', '.join(TEXT_KINDS)} files, but {_listed(others)}: copy them as "
            f".txt if they are text, or write JSON lines (.jsonl) with a field {text_field!r}"
        )
    if others:
        _log_others(path, len(others), min(others))
    return files


def _without_leftovers(path: Path, files: Sequence[Path]) -> list[Path]:
    """The files without `.arrow` files that the datasets library would not read, either.

    Raises:
        UserError: none is left.
    """
    data_sets = {folder: _data_files(folder) for folder in {file.parent for file in files}}
    kept, leftovers, caches = list[Path](), list[Path](), list[Path]()
    for file in files:
        named = data_sets[file.parent]
        if kind_of(file) != ARROW or (named is not None and file.name in named):
            kept.append(file)
        elif named is not None:
            leftovers.append(file)
        else:
            (caches if fnmatch(file.name, CACHES) else kept).append(file)
    groups = (
        (leftovers, f"{ARROW} files that the {DATASET_STATE} beside them does not name", logging.INFO),
        (caches, "caches of the datasets library", logging.WARNING),
    )
    for group, what, level in groups:
        if group and not kept:
            raise UserError(
                f"corpus {path} has only files that are left out, {what} ({len(group)}, such as "
                f"{min(group)}): name other files"
            )
        if group:
            _log_left_out(path, what, len(group), min(group), level)
    return kept


def _data_files(folder: Path) -> set[str] | None:
    """The names of the files of a data set that `save_to_disk` has written; None: the folder has none.

    Raises:
        UserError: one of them is missing.
    """
    state = folder / DATASET_STATE
    with _naming_files(state):
        content = state.read_bytes() if state.is_file() else b"null"
    try:
        names = {str(entry["filename"]) for entry in json.loads(content)["_data_files"]}
    except (ValueError, KeyError, TypeError, RecursionError):  # none, or of another program
        return None
    for name in sorted(names):
        if not os.path.lexists(folder / name):
            raise UserError(
                f"corpus file {folder / name} is missing, and {state} names it: copy it, or remove that file"
            )
    return names


def _listed(files: Sequence[Path]) -> str:
    """How many files of which kinds: `5 .py files`, `7 .py, .md and other files`."""
    counts = Counter(file.suffix for file in files)
    kinds = sorted(counts, key=lambda kind: (-counts[kind], kind))
    if kinds == [""]:
        return f"{len(files)} file{'s' * (len(files) > 1)} without a suffix, such as {min(files).name}"
    named = [kind for kind in kinds if kind][:2]
    rest = " and other" if len(kinds) > len(named) else ""
    return f"{len(files)} {', '.join(named)}{rest} file{'s' * (len(files) > 1)}"


@lru_cache(maxsize=64)  # so each is logged once: a run opens a corpus for several purposes
def _log_others(path: Path, count: int, first: Path) -> None:
    what = "1 file of another kind is" if count == 1 else f"{count} files of other kinds are"
    logger.info("corpus folder %s: %s not read, such as %s", path, what, first.relative_to(path))


def _folders(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A folder and all below it, except hidden ones and links, each with the names of its files.

    Raises:
        UserError: a folder cannot be read, so its text would be silently missing.
    """

    def refuse(error: OSError) -> None:
        reason = error.strerror or error
        raise UserError(
            f"corpus folder {error.filename} cannot be read ({reason}): fix or remove it"
        ) from error

    for folder, subfolders, names in os.walk(path, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for link in (Path(folder) / name for name in subfolders):
            if link.is_symlink():
                logger.warning("corpus folder %s is a link and not followed: name it, if it is meant", link)
        yield Path(folder), names


def _with_content(path: Path, files: Sequence[Path]) -> list[Path]:
    """The files that are not empty; all of them are opened.

    Raises:
        UserError: one cannot be read, or all are empty.
    """
    empty = [file for file in files if _is_empty(file)]
    _leave_out(path, files, empty, "empty files")
    left_out = set(empty)
    return [file for file in files if file not in left_out]


def _is_empty(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return not opened.read(1)
    except OSError as error:
        raise _unreadable(file, error) from error


def _leave_out(path: Path, files: Sequence[Path], empty: Sequence[Path], what: str) -> None:
    """Log which files of a folder or a glob have nothing to read.

    Raises:
        UserError: the corpus has no others.
    """
    if not empty:
        return
    if path.is_file():
        problem = "is empty" if what == "empty files" else "contains no text"
        raise UserError(f"corpus file {path} {problem}: remove or replace it")
    if len(empty) == len(files):
        raise UserError(f"corpus {path} has only {what} ({len(empty)}, such as {empty[0]}): name another")
    _log_left_out(path, what, len(empty), empty[0])


@lru_cache(maxsize=64)  # so each is logged once
def _log_left_out(path: Path, what: str, count: int, first: Path, level: int = logging.INFO) -> None:
    logger.log(level, "corpus %s: %s are left out (%d, such as %s)", path, what, count, first)


@contextmanager
def _naming_files(corpus: Path) -> Iterator[None]:
    """Let errors of the file system name the file, which may be gone by now; else the corpus."""
    try:
        yield
    except OSError as error:
        raise _unreadable(Path(error.filename or corpus), error) from error


def _changed(file: Path) -> CorpusChangedError:
    return CorpusChangedError(
        f"corpus file {file} changed while it was read: start again when nothing writes to it"
    )


def _unreadable(file: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(f"corpus file {file} cannot be read ({reason}): fix or remove it")
