"""The interface of a corpus: an iterator over documents and a fingerprint of them; a share of a corpus.

Equal fingerprints mean equal documents in the same order. `sources` lists the kinds of corpora.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from megalowbit.errors import UserError


class Corpus(ABC):
    """Documents in a fixed order."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The user's name for it, for messages."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal; equal for equal documents in the same order."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """Yield every non-empty document once.

        Raises:
            UserError: a file cannot be read, or is not in the format that its name suggests.
        """


class DocumentShare(Corpus):
    """The documents of a corpus that are held out for validation, or all others, in their order.

    A hash of its text alone decides about a document. Equal documents are therefore on the same side, and a
    document stays there if others are added, or if the share grows and it was held out.

    Args:
        corpus: all documents.
        share: of the hashes that is held out, between 0 and 1.
        is_held_out: whether these are the documents held out.
    """

    def __init__(self, corpus: Corpus, share: float, *, is_held_out: bool) -> None:
        self._corpus, self._share, self._is_held_out = corpus, share, is_held_out

    @property
    def name(self) -> str:
        """The corpus, and which part of it."""
        part = "held-out documents" if self._is_held_out else "documents not held out"
        return f"{self._corpus.name} ({part})"

    @property
    def fingerprint(self) -> str:
        """Depends on the corpus, the share and the side."""
        parts = ("share", self._corpus.fingerprint, self._share, self._is_held_out)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

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
