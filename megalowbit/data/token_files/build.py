"""Tokenises a corpus into one `.npy` file of ids, as a stream: text and ids need not fit into memory.

Every 30 s the file is synced, and a journal next to it notes the documents and tokens that it then has, with
a checksum. After a kill, the file is cut to what the journal says and continued from the next document.
Reading the documents before it again costs little compared with tokenising them.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from megalowbit.data.cache.built_files import journal_of
from megalowbit.data.corpus import Corpus, CorpusChangedError
from megalowbit.data.token_files.workers import Batch, Encoder, encode_in_order
from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError
from megalowbit.json_text import read_json_object
from megalowbit.values import counted

logger = logging.getLogger(__name__)

BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 2**20
HEADER_BYTES = 128
READ_SIZE = 2**22  # bytes
SECONDS_BETWEEN_JOURNALS = 30.0
SECONDS_BETWEEN_LINES = 30.0  # of progress in the log
SECONDS_BETWEEN_BARS = 0.2  # of progress in a terminal
BAR_WIDTH = 24


class Journal(NamedTuple):
    """How far a file is written.

    Attributes:
        documents: complete documents in it.
        tokens: their tokens.
        crc32: checksum of the tokens' bytes.
    """

    documents: int = 0
    tokens: int = 0
    crc32: int = 0

    @classmethod
    def read(cls, draft: Path, width: int) -> Journal:
        """The journal of `draft`, whose tokens have `width` bytes; an empty one if it does not match."""
        path = journal_of(draft)
        if not path.exists():
            return cls()
        try:
            found = read_json_object(path)
            journal = cls(**found)
            is_valid = all(type(each) is int and each >= 0 for each in journal)
            if is_valid and journal.crc32 == _checksum(draft, journal.tokens * width):
                return journal
        except (UserError, TypeError, OSError):
            pass
        logger.warning("%s does not match %s: tokenising from the beginning", path, draft.name)
        path.unlink(missing_ok=True)
        return cls()

    def write(self, draft: Path) -> None:
        with atomic_file(journal_of(draft)) as file:
            json.dump(self._asdict(), file)


def _checksum(path: Path, size: int) -> int | None:
    """CRC-32 of the `size` bytes after the header; None if the file is shorter."""
    checksum = 0
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while size:
            piece = file.read(min(size, READ_SIZE))
            if not piece:
                return None
            checksum, size = zlib.crc32(piece, checksum), size - len(piece)
    return checksum


def write_tokens(
    corpus: Corpus, tokenizer: Encoder, draft: Path, *, workers: int | None = 1
) -> dict[str, int]:
    """Write the ids of all documents, each followed by the end-of-document id, as a one-dimensional array.

    Args:
        corpus: its documents.
        tokenizer: tokenises them.
        draft: the file; what an earlier call has left is continued.
        workers: number of processes, see `encode_in_order`. The file does not depend on it.

    Returns:
        Numbers of `documents`, `tokens`, `bad_records` and `empty_records`.

    Raises:
        CorpusChangedError: the corpus was edited since its fingerprint was taken.
        UserError: the corpus cannot be read or contains no text, or a process was killed.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            f'tokenizer "{tokenizer.name}" is for corpora of token ids, and {corpus.name} is text: set '
            "data.tokenizer to one that tokenises"
        )
    done = Journal.read(draft, tokenizer.dtype.itemsize)
    if done.documents:
        logger.info("%s: continuing after %d documents", corpus.name, done.documents)
    else:
        logger.info("tokenising %s (%s), once", corpus.name, tokenizer.name)
    with draft.open("r+b" if done.documents else "wb") as file, Progress(corpus, done) as progress:
        file.write(_header(tokenizer.dtype, 0))  # written again below, when the number of tokens is known
        file.seek(HEADER_BYTES + done.tokens * tokenizer.dtype.itemsize)
        file.truncate()
        try:
            done = _append(file, corpus, tokenizer, draft, workers, done, progress)
        except CorpusChangedError:
            journal_of(draft).unlink(missing_ok=True)  # nothing of it may be continued
            raise
        file.seek(0)
        file.write(_header(tokenizer.dtype, done.tokens))
    if not done.documents:
        raise UserError(f"corpus {corpus.name} contains no text: name another")
    bad = corpus.bad_records
    progress.summarise(done, bad.count, bad.empty)
    return {
        "documents": done.documents,
        "tokens": done.tokens,
        "bad_records": bad.count,
        "empty_records": bad.empty,
    }


def _append(
    file: IO[bytes],
    corpus: Corpus,
    tokenizer: Encoder,
    draft: Path,
    workers: int | None,
    done: Journal,
    progress: Progress,
) -> Journal:
    """Write the documents after those that are done; returns the new journal, which is not written yet."""
    next_journal = time.monotonic() + SECONDS_BETWEEN_JOURNALS
    for sizes, ids in encode_in_order(batches_of(corpus, done.documents), tokenizer, workers):
        content = ids.data.cast("B")
        file.write(content)
        done = Journal(done.documents + len(sizes), done.tokens + len(ids), zlib.crc32(content, done.crc32))
        del ids, content  # before the next batch takes as much memory
        progress.show(done)
        if time.monotonic() >= next_journal:
            file.flush()
            os.fsync(file.fileno())
            corpus.check_unchanged()
            done.write(draft)
            next_journal = time.monotonic() + SECONDS_BETWEEN_JOURNALS
    return done


def batches_of(corpus: Corpus, skipped: int = 0) -> Iterator[Batch]:
    """Groups of documents, large enough to tokenise in parallel and small enough for memory.

    Args:
        corpus: its documents.
        skipped: how many of them to leave out.
    """
    batch, size = Batch([], []), 0
    for number, text in enumerate(itertools.islice(corpus.documents(), skipped, None), skipped + 1):
        batch.texts.append(text)
        batch.places.append(corpus.place or f"document {number} of corpus {corpus.name}")
        size += len(text)
        if len(batch.texts) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = Batch([], []), 0
    if batch.texts:
        yield batch


def _header(dtype: np.dtype[Any], num_tokens: int) -> bytes:
    """A `.npy` header of fixed length, which can be overwritten once the shape is known."""
    text = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(text, facts)
    header = text.getvalue()
    assert len(header) == HEADER_BYTES, "numpy pads headers so that a shape may grow in place"
    return header


class Progress:
    """Shows how far a corpus is tokenised: a bar in a terminal, else a line in the log every 30 s."""

    def __init__(self, corpus: Corpus, done: Journal | None = None) -> None:
        self._corpus = corpus
        self._tokens_before = (done or Journal()).tokens
        self._start = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._interval = SECONDS_BETWEEN_BARS if self._is_terminal else SECONDS_BETWEEN_LINES
        self._next = self._start + self._interval

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            with suppress(OSError):
                sys.stderr.write("\r\x1b[K")  # the bar
                sys.stderr.flush()

    def show(self, done: Journal) -> None:
        """Print, if it is time for it."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._interval
        share = self._corpus.share_read
        if not self._is_terminal:
            read = "" if share is None else f", {share:.0%} of the corpus read"
            logger.info("%s: %s%s", self._corpus.name, self._counts(done), read)
            return
        filled = round(BAR_WIDTH * (share or 0.0))
        bar = "" if share is None else f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {share:4.0%}  "
        with suppress(OSError):  # a terminal that is gone does not end the work
            sys.stderr.write(f"\r\x1b[K{bar}{self._counts(done)}")
            sys.stderr.flush()

    def summarise(self, done: Journal, num_bad: int, num_empty: int) -> None:
        """Log the totals."""
        seconds = time.monotonic() - self._start
        left_out = f"; left out: {num_bad} bad and {num_empty} empty records" if num_bad or num_empty else ""
        logger.info("%s: %s, %.1f s%s", self._corpus.name, self._counts(done), seconds, left_out)

    def _counts(self, done: Journal) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = (done.tokens - self._tokens_before) / seconds
        return f"{counted(done.documents, 'document')}, {done.tokens:,} tokens, {rate:,.0f} tokens/s"
