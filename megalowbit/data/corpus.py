"""The interface of a corpus: an iterator over documents and a fingerprint of them; a share of a corpus.

Equal fingerprints mean equal documents in the same order. `sources` lists the kinds of corpora. A record that
is not usable text (invalid UTF-8, a missing field, null …) is given to `BadRecords`, which decides whether it
is left out or ends the run.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalowbit.data.cache.digests import digest_of
from megalowbit.errors import UserError

logger = logging.getLogger(__name__)


class CorpusChangedError(UserError):
    """A file was edited after the fingerprint was taken, so the documents may be others."""


MOST_NAMED = 20  # bad records named in the log; a broken corpus would otherwise fill it


class BadRecords:
    """Counts the records that are left out, and raises when there are more than `limit`.

    Attributes:
        limit: how many bad records may be left out; 0: the first one is an error.
        count: bad records so far.
        empty: records without text so far. They are left out whatever `limit` is.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.count = self.empty = 0

    def reset(self) -> None:
        """Count from 0 again, because the corpus is read from its beginning."""
        self.count = self.empty = 0

    def add(self, error: UserError) -> None:
        """Count a record and log its error, which names the record.

        Raises:
            UserError: `error`, if there are now more than `limit` bad records.
        """
        self.count += 1
        if self.limit == 0:
            raise error
        if self.count > self.limit:
            raise UserError(
                f"{error} (bad record {self.count}, and data.max_bad_records is {self.limit})"
            ) from error
        if self.count <= MOST_NAMED:
            logger.warning("left out: %s (bad record %d of at most %d)", error, self.count, self.limit)
        if self.count == MOST_NAMED:
            logger.warning("further bad records are counted, but not named")


class Corpus(ABC):
    """Documents in a fixed order.

    Attributes:
        files: the files named by the user that have the documents; none: it has others, or they are unknown.
    """

    files: tuple[Path, ...] = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The user's name for it, for messages."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal; equal for equal documents in the same order."""

    @property
    def share_read(self) -> float | None:
        """How much of the corpus `documents` has read, 0 … 1; None if that is not known."""
        return None

    @property
    def place(self) -> str | None:
        """Where the last document of `documents` is, for messages; None: only its number is known."""
        return None

    @cached_property
    def bad_records(self) -> BadRecords:
        """Counts the records that the last iteration of `documents` has left out."""
        return BadRecords()

    def check_unchanged(self) -> None:  # noqa: B027 - most corpora have no files that others may edit
        """Check that what `documents` has read so far is what the fingerprint says.

        Raises:
            CorpusChangedError: it may not be.
        """

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """Yield every non-empty document once.

        Raises:
            CorpusChangedError: a file was edited between the fingerprint and the end of reading.
            UserError: a file cannot be read, or is not in the format that its name suggests, or has more bad
                records than are allowed.
        """


class TokenCorpus(Corpus):
    """A corpus of token ids, which need no tokenising and are read in place.

    Attributes:
        tokens: the ids of all documents, one after another; may be a memory map.
    """

    tokens: NDArray[Any]

    def documents(self) -> Iterator[str]:
        """Raise: there is no text."""
        raise UserError(
            f"corpus {self.name} consists of token ids, not text: set data.tokenizer to the tokenizer that "
            'made them, or to "none"'
        )

    @abstractmethod
    def place_of(self, index: int) -> str:
        """Where `tokens[index]` is, for messages: its document and the position in it."""

    def refuse_outside(self, ids: NDArray[Any], start: int, vocab_size: int) -> None:
        """Check that `ids`, which are `tokens[start : start + len(ids)]`, are in 0 … vocab_size-1.

        Raises:
            UserError: one is not; the message names it, its document and its position.
        """
        if int(ids.max()) < vocab_size and int(ids.min()) >= 0:
            return
        first = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
        raise UserError(
            f"corpus {self.name}: token id {ids[first]} at {self.place_of(start + first)} is outside the "
            f"vocabulary of {vocab_size} tokens: set data.tokenizer to the tokenizer that made the ids (with "
            '"none", data.vocab_size to their number)'
        )

    @abstractmethod
    def check_tokens(self, vocab_size: int, eos_token_id: int | None, *, needs_ends: bool = False) -> None:
        """Check a bounded number of ids before training, and with `needs_ends` the last one of each document.

        Raises:
            UserError: an id is outside 0 … vocab_size-1, or documents must end with `eos_token_id` and do
                not.
        """


class AllSources(Corpus):
    """The documents of several corpora in turn, one of each: what a tokenizer is trained on.

    Args:
        corpora: by the names of the sources.
    """

    def __init__(self, corpora: Mapping[str, Corpus]) -> None:
        self._corpora = corpora

    @property
    def name(self) -> str:
        """The names of the sources: those of all their files would fill a page."""
        return f"blend of {', '.join(self._corpora)}"

    @property
    def fingerprint(self) -> str:
        """Depends on the corpora and their order."""
        parts = ("all", *(each.fingerprint for each in self._corpora.values()))
        return digest_of(parts)

    @property
    def share_read(self) -> float | None:
        """The mean over the corpora."""
        shares = [each.share_read for each in self._corpora.values()]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if len(known) == len(shares) else None

    @property
    def bad_records(self) -> BadRecords:
        """The sums over the corpora, as they are now."""
        of = [each.bad_records for each in self._corpora.values()]
        found = BadRecords(sum(each.limit for each in of))
        found.count, found.empty = sum(each.count for each in of), sum(each.empty for each in of)
        return found

    def documents(self) -> Iterator[str]:
        """Documents in turn; a corpus that has no more is left out."""
        left = [each.documents() for each in self._corpora.values()]
        while left:
            for each in tuple(left):
                text = next(each, None)
                if text is None:
                    left.remove(each)
                else:
                    yield text


class DocumentShare(Corpus):
    """The documents of a corpus that are held out for validation, or all others, in their order.

    A hash of its text alone decides about a document. Equal documents are therefore on the same side, and a
    document stays there if others are added, or if the share grows and it was held out.

    Args:
        corpus: all documents.
        share: of the hashes that is held out, between 0 and 1.
        is_held_out: whether these are the documents held out.

    Raises:
        UserError: the corpus consists of token ids, which are read in place and cannot be divided.
    """

    def __init__(self, corpus: Corpus, share: float, *, is_held_out: bool) -> None:
        if isinstance(corpus, TokenCorpus):
            raise UserError(
                f"data.validation.share = {share:g} divides text, and corpus {corpus.name} consists of token "
                "ids: name other data in data.validation.corpus"
            )
        self._corpus, self._share, self._is_held_out = corpus, share, is_held_out

    @property
    def whole(self) -> Corpus:
        """All documents."""
        return self._corpus

    @property
    def name(self) -> str:
        """The corpus, and which part of it."""
        part = "held-out documents" if self._is_held_out else "documents not held out"
        return f"{self._corpus.name} ({part})"

    @property
    def fingerprint(self) -> str:
        """Depends on the corpus, the share and the side."""
        parts = ("share", self._corpus.fingerprint, self._share, self._is_held_out)
        return digest_of(parts)

    @property
    def bad_records(self) -> BadRecords:
        """Of both sides: each side reads the whole corpus."""
        return self._corpus.bad_records

    @property
    def share_read(self) -> float | None:
        """How much of the whole corpus is read."""
        return self._corpus.share_read

    @property
    def place(self) -> str | None:
        """As in the whole corpus."""
        return self._corpus.place

    def check_unchanged(self) -> None:
        """Check the whole corpus."""
        self._corpus.check_unchanged()

    def documents(self) -> Iterator[str]:
        """The documents of this side.

        Raises:
            UserError: there are none; or as for the corpus.
        """
        total = found = 0
        for text in self._corpus.documents():
            total += 1
            if (hash_of(text) < self._share) == self._is_held_out:
                found += 1
                yield text
        if not found and total == 1:
            raise UserError(
                f"data.validation.share = {self._share:g} cannot divide corpus {self._corpus.name}: a text "
                "file is one document, which no share can divide: name other text in data.validation.corpus, "
                "or a folder of files"
            )
        if not found:
            problem = "holds out none" if self._is_held_out else "holds out all"
            remedy = "raise" if self._is_held_out else "lower"
            raise UserError(
                f"data.validation.share = {self._share:g} {problem} of the {total:,} documents of corpus "
                f"{self._corpus.name}: {remedy} it, or name other text in data.validation.corpus"
            )


def hash_of(text: str) -> float:
    """A number in 0 … 1 that depends on the text alone; the same on all machines."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"validation").digest()
    return int.from_bytes(digest, "little") / 2**64
