"""Where text comes from, by the name that a user writes: one list of the kinds of corpora.

The first kind that claims a name opens it: `"stdlib"`; else a path that exists is local; else it is the name
of a Hugging Face data set. A new kind is a file with its `Corpus` and its place in `SOURCES`.
Not covered: streaming data sets, mixtures of several corpora.
"""

from __future__ import annotations

from typing import Protocol

from megalowbit.data.corpus import Corpus
from megalowbit.data.hub import HubCorpus
from megalowbit.data.local_files import LOCAL_SUFFIXES, LocalCorpus
from megalowbit.data.settings import DataSettings
from megalowbit.data.stdlib import STDLIB, StdlibCorpus
from megalowbit.errors import UserError


class Source(Protocol):
    """A kind of corpus: what a `Corpus` class offers here, beside its constructor."""

    def is_meant(self, corpus: str) -> bool:
        """Whether this text, `data.corpus`, names one of this kind; the kinds before have declined."""

    def open(self, settings: DataSettings, /) -> Corpus:
        """The corpus that `settings` names; errors as of its constructor."""


SOURCES: tuple[Source, ...] = (StdlibCorpus, LocalCorpus, HubCorpus)


def source_of(settings: DataSettings) -> Source:
    """The kind of corpus that `settings` names.

    Raises:
        UserError: it is a path, and nothing is there.
    """
    for source in SOURCES:
        if source.is_meant(settings.corpus):
            return source
    raise UserError(
        f"corpus {settings.corpus!r} does not exist: "
        f'name a {", ".join(LOCAL_SUFFIXES)} file, a folder of them, "{STDLIB}" or a data set'
    )


def open_corpus(settings: DataSettings) -> Corpus:
    """The corpus `settings` names.

    Raises:
        UserError: no such file or folder, nothing usable in it, or no such data set.
    """
    return source_of(settings).open(settings)


def is_on_hub(settings: DataSettings) -> bool:
    """Whether the corpus is a Hugging Face data set, for which opening it may mean a download.

    Raises:
        UserError: it is a path, and nothing is there.
    """
    return source_of(settings) is HubCorpus
