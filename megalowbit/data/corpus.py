"""What a corpus is: an iterator of documents and a fingerprint of what they are.

The same fingerprint means the same documents in the same order. `sources` lists the kinds of corpora.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator


class Corpus(ABC):
    """Documents in a fixed order."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What the user would call it, for messages."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal; equal for equal documents in equal order."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """Yield every non-empty document once.

        Raises:
            UserError: a file cannot be read as what it claims to be.
        """
