"""Megatron's files: token ids in `PREFIX.bin`, and in `PREFIX.idx` where sequences and documents begin.

    .bin   the ids of all sequences, one after another, little-endian, without a header
    .idx   9 bytes   "MMIDIDX" and two zeros
           uint64    version, 1
           uint8     code of the ids' dtype, see `DTYPES`
           uint64    S, number of sequences
           uint64    D, number of documents + 1
           int32     length of each sequence, S of them
           int64     byte in .bin at which each sequence begins, S of them
           int64     first sequence of each document, and S at the end, D of them
           int8      mode of each sequence, S of them, only in multimodal data

Both files are memory-mapped. The header, the sizes of the files and the ends of the tables are always
checked. Tables of up to 256 Ki entries and up to 4 Mi ids are checked completely; of larger ones, 256 evenly
spaced blocks are checked, so that opening takes the same time and memory for any size. Ids in the other
blocks are checked when they are read. Where batches keep documents apart, the last ids of all documents are
checked, once for each state of the files.

Sequences must follow each other in `.bin` without gaps, as every writer puts them there. Not covered: modes
(read, not used), ids as floating point numbers, and files on object stores.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import uuid
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalowbit.data.cache.digests import (
    corpus_digests,
    file_facts,
    is_in_future,
    is_settled,
    key_of,
    read_note,
    write_note,
)
from megalowbit.data.corpus import TokenCorpus
from megalowbit.data.settings import TOKEN_SUFFIXES, DataSettings, is_token_prefix
from megalowbit.durable_files import sync
from megalowbit.errors import UserError, file_system_error

logger = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
BIN, IDX = TOKEN_SUFFIXES
LARGEST_SEQUENCE = 2**31 - 1
NUM_BLOCKS = 256
TABLE_BLOCK = 2**10  # entries; tables of up to 256 Ki entries are checked completely
ID_BLOCK = 2**14  # ids; up to 4 Mi of them are checked completely
DOCUMENTS_WITH_END = 1000  # are looked at, evenly spaced, for the warning that none has an end
DOCUMENTS_AT_ONCE = 2**14  # bounds the pages that are mapped while all documents are looked at
ENTRIES_PER_WRITE = 2**20


class MegatronIndex(NamedTuple):
    """The content of an `.idx` file; the arrays are memory maps.

    Attributes:
        dtype: of the ids.
        sizes: (S,) tokens of each sequence.
        pointers: (S,) first byte of each sequence.
        documents: (D,) first sequence of each document, and S.
        modes: (S,) of multimodal data, else None.
    """

    dtype: np.dtype[Any]
    sizes: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]
    modes: NDArray[np.int8] | None

    @classmethod
    def read(cls, path: Path, num_bytes: int) -> MegatronIndex:
        """Map and check an index.

        Args:
            path: the `.idx` file.
            num_bytes: size of the `.bin` file.

        Raises:
            UserError: the file cannot be read, or is not an index of a `.bin` file of this size.
        """
        try:
            with path.open("rb") as file:
                return cls._checked(path, file, num_bytes)
        except OSError as error:
            raise _unreadable(path, error) from error

    @classmethod
    def _checked(cls, path: Path, file: IO[bytes], num_bytes: int) -> MegatronIndex:
        header = file.read(HEADER.size)
        size = os.fstat(file.fileno()).st_size
        if header[: len(MAGIC)] != MAGIC:
            raise UserError(
                f"{path} is not an index of Megatron: it does not begin with {MAGIC[:7].decode()}"
            )
        if len(header) < HEADER.size:
            raise UserError(f"{path} is truncated: it has {size} bytes, fewer than its header; replace it")
        _, version, code, num_sequences, num_documents = HEADER.unpack(header)
        if version != VERSION:
            raise UserError(f"{path} has version {version}: write it as version {VERSION}")
        if code not in DTYPES:
            raise UserError(f"{path} has dtype code {code}, and only 1 … {max(DTYPES)} exist: replace it")
        dtype = np.dtype(DTYPES[code])
        if dtype.kind == "f":
            raise UserError(f"{path} says that ids are {dtype.name}: write them as integers")
        has_modes = _has_modes(path, size, num_sequences, num_documents)
        offset = HEADER.size
        tables: list[Any] = []
        for kind, count in (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_documents)):
            tables.append(np.memmap(path, kind, "r", offset, (count,)))
            offset += tables[-1].nbytes
        sizes, pointers, documents = tables
        modes = np.memmap(path, "i1", "r", offset, (num_sequences,)) if has_modes else None
        index = cls(dtype, sizes, pointers, documents, modes)
        index._check_sequences(path, file, num_bytes)
        index._check_documents(path, file)
        return index

    def _check_sequences(self, path: Path, file: IO[bytes], num_bytes: int) -> None:
        width, count = self.dtype.itemsize, len(self.sizes)
        end = int(self.pointers[-1]) + int(self.sizes[-1]) * width
        if self.pointers[0] != 0:
            raise UserError(
                f"{path}: the first sequence begins at byte {self.pointers[0]}, not 0: replace it"
            )
        for start, stop in evenly_spaced(count, TABLE_BLOCK):
            sizes = entries(file, self.sizes, start, stop).astype(np.int64)
            pointers = entries(file, self.pointers, start, min(stop + 1, count))
            # sizes have no upper bound here: the pointers that follow from them have one
            for what, values, is_wrong in (
                ("size", sizes, sizes < 0),
                ("pointer", pointers, (pointers < 0) | (pointers > num_bytes)),
            ):
                wrong = np.flatnonzero(is_wrong)
                if len(wrong):
                    raise UserError(
                        f"{path}: {what} {values[wrong[0]]} of sequence {start + wrong[0]} is outside the "
                        f".bin file of {num_bytes} bytes: replace both files"
                    )
            gaps = np.flatnonzero(pointers[:-1] + sizes[: len(pointers) - 1] * width != pointers[1:])
            if len(gaps):
                raise UserError(
                    f"{path}: sequence {start + gaps[0] + 1} begins at byte {pointers[gaps[0] + 1]}, not "
                    "where the one before it ends: write both files again, with sequences in order"
                )
        if end != num_bytes:
            raise UserError(
                f"{path.with_suffix(BIN)} has {num_bytes} bytes, and its index {path.name} describes {end}: "
                "one of them is truncated or belongs to other data; replace both"
            )

    def _check_documents(self, path: Path, file: IO[bytes]) -> None:
        first, last, count = int(self.documents[0]), int(self.documents[-1]), len(self.sizes)
        if (first, last) != (0, count):
            raise UserError(
                f"{path}: its documents are sequences {first} … {last}, not 0 … {count}: replace it"
            )
        for start, stop in evenly_spaced(len(self.documents), TABLE_BLOCK):
            indices = entries(file, self.documents, start, min(stop + 1, len(self.documents)))
            wrong = np.flatnonzero((indices[1:] < indices[:-1]) | (indices[1:] > count))
            if len(wrong):
                raise UserError(
                    f"{path}: document {start + wrong[0] + 1} begins at sequence {indices[wrong[0] + 1]}, "
                    f"after sequence {indices[wrong[0]]}, of {count} in all: replace it"
                )


def _has_modes(path: Path, size: int, num_sequences: int, num_documents: int) -> bool:
    """Whether the file has a mode for each sequence; checks that its size fits its header."""
    if num_sequences == 0 or num_documents < 2:
        raise UserError(f"{path} has no documents: name other data")
    expected = HEADER.size + num_sequences * (4 + 8) + num_documents * 8
    if size < expected:
        raise UserError(
            f"{path} is truncated: it has {size} bytes, and {num_sequences} sequences in "
            f"{num_documents - 1} documents take {expected}; replace it"
        )
    if size not in (expected, expected + num_sequences):
        raise UserError(
            f"{path} has {size} bytes, and {num_sequences} sequences in {num_documents - 1} documents take "
            f"{expected}, or {expected + num_sequences} with modes: replace it"
        )
    return size != expected


def evenly_spaced(count: int, block: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of the blocks to check among `count` entries: all of them, or 256 with both ends."""
    starts: Iterable[int] = range(0, count, block)
    if count > NUM_BLOCKS * block:
        starts = ((count - block) * number // (NUM_BLOCKS - 1) for number in range(NUM_BLOCKS))
    return ((start, min(start + block, count)) for start in starts)


def entries(file: IO[bytes], table: Any, start: int, stop: int) -> NDArray[Any]:
    """`table[start:stop]` of a memory map, read from its file.

    Pages of a map count as memory of the process, and the system maps 16 of them for one that is used.
    """
    width = table.itemsize
    content = os.pread(file.fileno(), (stop - start) * width, table.offset + start * width)
    return np.frombuffer(content, table.dtype)


class MegatronCorpus(TokenCorpus):
    """The documents of a pair of files.

    Args:
        path: the prefix of the files, or one of them.
        cache_dir: where digests of the files are remembered; None: nowhere.

    Raises:
        UserError: a file is missing, cannot be read, is damaged, or does not belong to the other.
    """

    def __init__(self, path: Path, *, cache_dir: Path | None = None) -> None:
        self._cache_dir = cache_dir
        self.prefix = _prefix(path)
        self.bin, self.idx = (Path(f"{self.prefix}{suffix}") for suffix in (BIN, IDX))
        self.files = (self.bin,)  # without the index: another one has the same ids
        for file, other in ((self.bin, self.idx), (self.idx, self.bin)):
            if not file.is_file():
                raise UserError(f"{file} is missing or not a regular file, and {other} needs it: restore it")
        try:
            num_bytes = self.bin.stat().st_size
            self.index = MegatronIndex.read(self.idx, num_bytes)
            if num_bytes == 0:
                raise UserError(f"{self.bin} is empty: name other data")
            self.tokens = np.memmap(self.bin, self.index.dtype, "r")
        except OSError as error:
            raise _unreadable(self.bin, error) from error

    @classmethod
    def is_meant(cls, corpus: str) -> bool:
        path = Path(corpus).expanduser()
        if path.suffix not in (BIN, IDX) and path.exists():
            return False
        return is_token_prefix(_prefix(path))

    @classmethod
    def open(cls, settings: DataSettings) -> MegatronCorpus:
        return cls(Path(settings.corpus).expanduser(), cache_dir=settings.cache_dir)

    @property
    def name(self) -> str:
        return str(self.prefix)

    @property
    def num_documents(self) -> int:
        return len(self.index.documents) - 1

    def document(self, number: int) -> NDArray[Any]:
        """The ids of a document."""
        first, after = (int(each) for each in self.index.documents[number : number + 2])
        return self.tokens[self._token_of(first) : self._token_of(after)]

    @cached_property
    def fingerprint(self) -> str:  # it may read the files
        digests = " ".join(corpus_digests((self.bin, self.idx), self._cache_dir))
        return hashlib.sha256(f"Megatron {digests}".encode()).hexdigest()

    def place_of(self, index: int) -> str:
        # bisect reads single entries; numpy's searchsorted would copy the unaligned map into memory
        sequence = bisect_right(self.index.pointers, index * self.index.dtype.itemsize) - 1
        document = bisect_right(self.index.documents, sequence) - 1
        position = index - self._token_of(int(self.index.documents[document]))
        return f"position {position} of document {document}"

    def check_tokens(self, vocab_size: int, eos_token_id: int | None, *, needs_ends: bool = False) -> None:
        with self._opened(self.bin) as file:
            for start, stop in evenly_spaced(len(self.tokens), ID_BLOCK):
                self.refuse_outside(entries(file, self.tokens, start, stop), start, vocab_size)
        if eos_token_id is None:
            return
        remedy = f"the end-of-document id {eos_token_id} of data.tokenizer: make the files with --append-eod"
        if needs_ends:
            if (number := self._first_without_end(eos_token_id)) is not None:
                raise UserError(f"{self.name}: document {number} does not end with {remedy}")
            return
        without, checked = self._without_end(eos_token_id)
        if checked and len(without) == checked:
            logger.warning("%s: nothing separates documents, because none ends with %s", self.name, remedy)

    def _first_without_end(self, eos_token_id: int) -> int | None:
        """The first document that has tokens and does not end with the id; None: there is none.

        `cache_dir/digests` notes for which sizes, inodes and times of the files there is none, and the files
        are not read again while these stay. If that cannot be noted, only blocks of documents are looked at.
        """
        with self._opened(self.bin):
            facts = [file_facts(path) for path in (self.bin, self.idx)]
        # the state is in the name: mounts of one folder may give the files different inodes
        state = repr((str(self.prefix.absolute()), facts, eos_token_id))
        note = self._cache_dir and self._cache_dir / "digests" / f"{key_of(state)}.ends.txt"
        if note is not None and read_note(note) == state:
            return None
        is_noted = note is not None and all(map(is_settled, facts))
        count, blocks = self.num_documents, evenly_spaced(self.num_documents, TABLE_BLOCK)
        if any(map(is_in_future, facts)):
            problem: str | None = "the files have a time in the future: touch them"
        else:  # before a long work whose result could not be noted
            problem = write_note(note, "") if note is not None and is_noted else None
        if problem is not None:
            some = f"{min(count, NUM_BLOCKS * TABLE_BLOCK)} of {count}"
            logger.warning("%s: starts look at the ends of %s documents: %s", self.name, some, problem)
        else:
            logger.info(
                "%s: looking at the ends of all %d documents; --prepare-data does, too", self.name, count
            )
            starts = range(0, count, DOCUMENTS_AT_ONCE)
            blocks = ((start, min(start + DOCUMENTS_AT_ONCE, count)) for start in starts)
        for start, stop in blocks:
            if (number := self._without_end_within(start, stop, eos_token_id)) is not None:
                return number
        if note is not None and is_noted and problem is None:
            write_note(note, state)
        return None

    def _without_end_within(self, start: int, stop: int, eos_token_id: int) -> int | None:
        bounds = self._bounds(start, stop)
        with_tokens = np.flatnonzero(bounds[1:] > bounds[:-1])
        # a map for each block: pages stay in the process until their map is closed
        with self._opened(self.bin) as file:
            ends = np.memmap(file, self.index.dtype, "r")[bounds[1:][with_tokens] - 1]
        without = with_tokens[ends != eos_token_id]
        return start + int(without[0]) if len(without) else None

    def _bounds(self, start: int, stop: int) -> NDArray[np.int64]:
        """First tokens of the documents start … stop-1, and the end of the last one: (stop - start + 1,)."""
        count, documents = len(self.index.sizes), self.index.documents
        with self._opened(self.idx) as file:
            sequences = entries(file, documents, start, stop + 1)
            pointers = np.memmap(file, "<i8", "r", HEADER.size + self.index.sizes.nbytes, (count,))
        bounds = np.full(len(sequences), len(self.tokens), np.int64)
        is_inside = (sequences >= 0) & (sequences < count)
        bounds[is_inside] = pointers[sequences[is_inside]] // self.index.dtype.itemsize
        is_wrong = (sequences < 0) | (sequences > count) | (bounds < 0) | (bounds > len(self.tokens))
        wrong = np.flatnonzero(is_wrong)
        wrong = wrong if len(wrong) else 1 + np.flatnonzero(bounds[1:] < bounds[:-1])
        if len(wrong):
            raise UserError(
                f"{self.idx}: document {start + wrong[0]} begins at sequence {sequences[wrong[0]]}, which is "
                "outside the file or before the document before it: replace both files"
            )
        return bounds

    def _without_end(self, eos_token_id: int) -> tuple[list[int], int]:
        """Documents that do not end with the id, and the number of those that were looked at."""
        count = min(self.num_documents, DOCUMENTS_WITH_END)
        numbers = [number * self.num_documents // count for number in range(count)]
        with self._opened(self.bin) as ids, self._opened(self.idx) as index:
            ends = {number: self._last_id(number, ids, index) for number in numbers}
        lasts = {number: last for number, last in ends.items() if last is not None}
        return [number for number, last in lasts.items() if last != eos_token_id], len(lasts)

    def _last_id(self, number: int, ids: IO[bytes], index: IO[bytes]) -> int | None:
        """The last id of a document; None: it has none."""
        first, after = entries(index, self.index.documents, number, number + 2).tolist()
        sizes = entries(index, self.index.sizes, first, after)
        if not sizes.any():
            return None
        last = first + int(np.flatnonzero(sizes)[-1])
        start = int(entries(index, self.index.pointers, last, last + 1)[0]) // self.index.dtype.itemsize
        place = start + int(sizes[last - first]) - 1
        return int(entries(ids, self.tokens, place, place + 1)[0])

    @contextmanager
    def _opened(self, path: Path) -> Iterator[IO[bytes]]:
        try:
            with path.open("rb") as file:
                yield file
        except OSError as error:
            raise _unreadable(Path(error.filename or path), error) from error

    def _token_of(self, sequence: int) -> int:
        """Index of the first token of a sequence; `sequence` may be one after the last."""
        if sequence == len(self.index.pointers):
            return len(self.tokens)
        return int(self.index.pointers[sequence]) // self.index.dtype.itemsize


class MegatronWriter:
    """Writes a pair of files; each document is one sequence.

    The files have temporary names until the block ends without an error. A crash at any moment leaves the old
    pair, the new pair, or a `.bin` file without an index, which no reader accepts.

    Args:
        prefix: path of the files without `.bin` and `.idx`; its folder must exist.
        vocab_size: ids are 0 … vocab_size-1; stored as uint16 if it is at most 65,536, else as int32.

    Raises:
        UserError: a file cannot be written.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.code = 8 if vocab_size <= 2**16 else 4
        self.dtype = np.dtype(DTYPES[self.code])
        self.num_tokens = 0
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._sizes = array("i")
        name = f".{prefix.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._drafts = {suffix: prefix.with_name(f"{name}{suffix}.tmp") for suffix in (BIN, IDX)}
        try:
            self._file = self._drafts[BIN].open("xb")
        except OSError as error:
            raise self._unwritable(error) from error

    @property
    def num_documents(self) -> int:
        return len(self._sizes)

    def add_document(self, ids: NDArray[Any]) -> None:
        """Append a document of ids (tokens,)."""
        if len(ids) > LARGEST_SEQUENCE:
            raise UserError(f"a document of {len(ids)} tokens is longer than the format allows: divide it")
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size):
            raise ValueError(f"ids must be 0 … {self._vocab_size - 1}, not {ids.min()} … {ids.max()}")
        try:
            self._file.write(np.ascontiguousarray(ids, self.dtype).data)
        except OSError as error:
            raise self._unwritable(error) from error
        self._sizes.append(len(ids))
        self.num_tokens += len(ids)

    def __enter__(self) -> MegatronWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is None:
                    _flush(self._file)
            if kind is None:
                with self._drafts[IDX].open("xb") as file:
                    self._write_index(file)
                    _flush(file)
                self._move_into_place()
        except OSError as failure:
            raise self._unwritable(failure) from failure
        finally:
            for draft in self._drafts.values():
                draft.unlink(missing_ok=True)

    def _write_index(self, file: IO[bytes]) -> None:
        sizes = np.frombuffer(self._sizes, np.int32)
        file.write(HEADER.pack(MAGIC, VERSION, self.code, len(sizes), len(sizes) + 1))
        file.write(sizes.astype("<i4", copy=False).data)
        start = 0
        for first in range(0, len(sizes), ENTRIES_PER_WRITE):
            ends = start + np.cumsum(sizes[first : first + ENTRIES_PER_WRITE], dtype="<i8")
            file.write((np.concatenate([[start], ends[:-1]]) * self.dtype.itemsize).astype("<i8").data)
            start = int(ends[-1])
        for first in range(0, len(sizes) + 1, ENTRIES_PER_WRITE):
            file.write(np.arange(first, min(first + ENTRIES_PER_WRITE, len(sizes) + 1), dtype="<i8").data)

    def _move_into_place(self) -> None:
        index = Path(f"{self._prefix}{IDX}")
        index.unlink(missing_ok=True)  # an old index must not be read with the new ids
        for suffix, draft in self._drafts.items():  # the index last
            draft.replace(f"{self._prefix}{suffix}")
        sync(index.parent)

    def _unwritable(self, error: OSError) -> UserError:
        message = f"{self._prefix}{BIN} cannot be written ({error.strerror or error}): name another prefix"
        return file_system_error(message, error)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _prefix(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in (BIN, IDX) else path


def _unreadable(path: Path, error: OSError) -> UserError:
    return file_system_error(f"{path} cannot be read ({error.strerror or error}): fix it", error)
