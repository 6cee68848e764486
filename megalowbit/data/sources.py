"""Opens a corpus by name, and lists the kinds of corpora.

`"stdlib"` is the standard library; the prefix of Megatron's files, or one of them, names token ids; an
existing path or a glob is a local corpus; any other name is a Hugging Face data set. To add a kind, write a
file with its `Corpus` class and add the class to `SOURCES`, in the order of precedence. Not covered:
streaming data sets, and mixtures of several corpora.
"""

from __future__ import annotations

from typing import Protocol

from megalowbit.data.corpus import Corpus
from megalowbit.data.hub import HubCorpus
from megalowbit.data.settings import TEXT_KINDS, DataSettings
from megalowbit.data.stdlib import STDLIB, StdlibCorpus
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.token_files.megatron import MegatronCorpus
from megalowbit.errors import UserError


class Source(Protocol):
    """A kind of corpus: class methods that a `Corpus` class needs for `SOURCES`."""

    def is_meant(self, corpus: str) -> bool:
        """Whether `data.corpus` names a corpus of this kind; called only if no earlier kind matched."""

    def open(self, settings: DataSettings, /) -> Corpus:
        """Open the corpus of `settings`; raises the errors of its constructor."""


SOURCES: tuple[Source, ...] = (StdlibCorpus, MegatronCorpus, LocalCorpus, HubCorpus)


def source_of(settings: DataSettings) -> Source:
    """The kind of corpus that `settings` names.

    Raises:
        UserError: it is a path that does not exist.
    """
    for source in SOURCES:
        if source.is_meant(settings.corpus):
            return source
    raise UserError(
        f"corpus {settings.corpus!r} does not exist: "
        f"name a {', '.join(TEXT_KINDS[:-1])} or {TEXT_KINDS[-1]} file, a folder or a glob of them, the "
        f'prefix of .bin and .idx files, "{STDLIB}" or a data set'
    )


def open_corpus(settings: DataSettings) -> Corpus:
    """Open the corpus of `settings`.

    Raises:
        UserError: the file, folder or data set does not exist or cannot be used.
    """
    return source_of(settings).open(settings)


def is_on_hub(settings: DataSettings) -> bool:
    """Whether the corpus is a Hugging Face data set; opening it may download it.

    Raises:
        UserError: it is a path that does not exist.
    """
    return source_of(settings) is HubCorpus
