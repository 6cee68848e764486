"""The interface of a corpus: an iterator over documents and a fingerprint of them.

Equal fingerprints mean equal documents in the same order. `sources` lists the kinds of corpora.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator


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
