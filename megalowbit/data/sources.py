"""Opens a corpus by name, and lists the kinds of corpora.

`"stdlib"` is the standard library; the prefix of Megatron's files, or one of them, names token ids; an
existing path or a glob is a local corpus; any other name is a Hugging Face data set. To add a kind, write a
file with its `Corpus` class and add the class to `SOURCES`, in the order of precedence. `data.sources` names
several corpora, each of its own kind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megalowbit.data.cache.digests import corpus_digests
from megalowbit.data.corpus import AllSources, Corpus, DocumentShare
from megalowbit.data.hub import DEFAULT_CONFIG, HubCorpus, split_read, splits_overlap
from megalowbit.data.settings import BLEND, TEXT_KINDS, DataSettings
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.text_files.stdlib import STDLIB, StdlibCorpus
from megalowbit.data.token_files.megatron import MegatronCorpus
from megalowbit.errors import UserError, file_system_error

logger = logging.getLogger(__name__)

NOTABLE_SHARE = 0.01  # of the bytes of held-out text; fewer copies hardly change its loss


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


def sources_of(settings: DataSettings) -> dict[str, DataSettings]:
    """The settings of each corpus for training, by the name of the source; without sources, one named ""."""
    if settings.sources is None:
        return {"": settings}
    return {
        name: settings.model_copy(
            update={
                "corpus": each.corpus,
                "corpus_config": each.corpus_config,
                "split": each.split,
                "stream": each.stream,
                "text_field": each.text_field or settings.text_field,
                "sources": None,
                "phases": (),
            }
        )
        for name, each in settings.sources.items()
    }


def open_corpus(settings: DataSettings) -> Corpus:
    """Open the corpus of `settings`, or all sources, without documents that are held out for validation.

    Raises:
        UserError: the file, folder or data set does not exist or cannot be used.
    """
    if settings.sources is not None:
        return AllSources({name: open_source(name, each) for name, each in sources_of(settings).items()})
    source = source_of(settings)
    if settings.stream is not None and source is not HubCorpus:
        raise UserError(
            f"stream = {settings.stream!r} needs a Hugging Face data set, and corpus {settings.corpus} is "
            "none: remove it; text of other kinds is not copied"
        )
    corpus = source.open(settings)
    share = None if settings.validation is None else settings.validation.share
    return corpus if share is None else DocumentShare(corpus, share, is_held_out=False)


def open_source(name: str, settings: DataSettings) -> Corpus:
    """Open a source of `sources_of`, without the documents that are held out for validation.

    Raises:
        UserError: it does not exist or cannot be used; the message names the source.
    """
    try:
        return open_corpus(settings)
    except UserError as error:
        if not name:
            raise
        raise type(error)(f"data.sources.{name}: {error}") from error


def open_validation_corpus(settings: DataSettings, *, is_training: bool = True) -> Corpus:
    """Open the text for validation that `settings.validation` names; arguments as `validation_settings`.

    Raises:
        UserError: it does not exist or cannot be used, or it is the text for training.
    """
    assert settings.validation is not None, "the caller has checked it"
    corpus = open_corpus(validation_settings(settings, is_training=is_training))
    share = settings.validation.share
    return corpus if share is None else DocumentShare(corpus, share, is_held_out=True)


def check_held_out(held_out: Corpus, corpora: Iterable[Corpus], cache_dir: Path | None) -> None:
    """Check that the text for validation is not known to be trained on.

    A file that is in both is refused. Copies, wherever they are and whatever they are called (also Megatron's
    `.bin` with another `.idx`), are refused if they are a notable part of the text; fewer, such as a licence
    in many folders, are a warning.

    Not noticed: equal documents in files that differ (parts of a file, another format or compression), in
    splits, configurations or data sets of other names, and in a file and a data set.

    Args:
        held_out: the text for validation.
        corpora: what is trained on.
        cache_dir: folder of the cache, which remembers digests of files; None: remember nothing.

    Raises:
        UserError: it is, or a part of it, and the message names what; or a file cannot be read.
    """
    if isinstance(held_out, DocumentShare):  # training leaves its documents out, by their text
        return
    corpora = tuple(corpora)
    for corpus in corpora:
        if _have_common_rows(held_out, corpus):
            raise UserError(
                f"data.validation: {held_out.name} is the text for training, in corpus {corpus.name}: name "
                "other text, or set share"
            )
    with _naming_the_file():
        equal = _equal_files(held_out.files, [file for corpus in corpora for file in corpus.files], cache_dir)
        if not equal:
            return
        same = [file for file, other in equal.items() if file.samefile(other)]
        part, whole = (sum(file.stat().st_size for file in files) for files in (equal, held_out.files))
    file = (same or [*equal])[0]
    shown = str(file) if file == equal[file] else f"{file} (equal to {equal[file]})"
    if same or part >= NOTABLE_SHARE * whole:
        raise UserError(
            f"data.validation: {shown} is the text for training: name other text, move it elsewhere, or set "
            "share"
        )
    logger.warning(
        "data.validation: files equal to files for training: %d of %d, %.2g %% of the bytes, such as %s",
        len(equal),
        len(held_out.files),
        100 * part / whole,
        shown,
    )


def _have_common_rows(one: Corpus, other: Corpus) -> bool:
    """Whether fingerprints are equal, or splits of one data set have rows in common.

    A split of a length that is not known is taken to have all rows that it may have, and a stream those of
    `split_read`.
    """
    if isinstance(one, HubCorpus) and isinstance(other, HubCorpus):
        is_same_set = (one.dataset_name, one.config_name) == (other.dataset_name, other.config_name)
        lengths = {**one.split_lengths, **other.split_lengths}
        first, second = (split_read(each.split, each.stream, each.bad_records.limit) for each in (one, other))
        if is_same_set and splits_overlap(first, second, lengths) is not False:
            return True
    return one.fingerprint == other.fingerprint


def is_same_text(one: Corpus, other: Corpus, cache_dir: Path | None) -> bool:
    """Whether two sources have the same documents, as far as is known; see `check_held_out`.

    Raises:
        UserError: a file cannot be read.
    """
    one, other = (each.whole if isinstance(each, DocumentShare) else each for each in (one, other))
    if one.fingerprint == other.fingerprint:
        return True
    if isinstance(one, HubCorpus) and isinstance(other, HubCorpus):
        streams = {"all" if each.stream is None else each.stream for each in (one, other)}
        first, second = (
            (each.dataset_name, each.config_name, each.split, each.text_field) for each in (one, other)
        )
        return first == second and len(streams) == 1
    if isinstance(one, LocalCorpus) and isinstance(other, LocalCorpus) and one.text_field != other.text_field:
        return False
    count = len(one.files)
    with _naming_the_file():
        return 0 < count == len(other.files) == len(_equal_files(one.files, other.files, cache_dir))


def _equal_files(files: Sequence[Path], others: Sequence[Path], cache_dir: Path | None) -> dict[Path, Path]:
    """Each of `files` that is equal to one of `others`, with that one: with itself, if it is one of them.

    Only files are read whose sizes are equal, at most 1 GiB in all, and once; see `corpus_digests`.
    """
    facts, known = ({file: file.stat() for file in each} for each in (files, others))
    sizes = {each.st_size for each in facts.values()} & {each.st_size for each in known.values()}
    facts, known = (
        {file: found for file, found in each.items() if found.st_size in sizes} for each in (facts, known)
    )
    both = tuple({**facts, **known})
    digests = dict(zip(both, corpus_digests(both, cache_dir), strict=True))
    equal: dict[tuple[Any, ...], Path] = {}
    for file, found in known.items():
        equal |= {(digests[file],): file, (digests[file], found.st_dev, found.st_ino): file}
    pairs: dict[Path, Path] = {}
    for file, found in facts.items():
        same = equal.get((digests[file], found.st_dev, found.st_ino), equal.get((digests[file],)))
        pairs |= {} if same is None else {file: same}
    return pairs


@contextmanager
def _naming_the_file() -> Iterator[None]:
    """Let errors of the file system name the file."""
    try:
        yield
    except OSError as error:
        message = f"corpus file {error.filename} cannot be read ({error.strerror or error}): fix it"
        raise file_system_error(message, error) from error


def validation_settings(settings: DataSettings, *, is_training: bool = True) -> DataSettings:
    """The settings of the corpus that `settings.validation` names, or of which it takes a share.

    Args:
        settings: of the run.
        is_training: refuse the text for training. Without training, its loss shows how far it is below that
            of other text.

    Raises:
        UserError: it is the text for training, or has no splits.
    """
    source = settings.validation
    assert source is not None, "the caller has checked it"
    named = {"corpus": settings.corpus, "corpus_config": settings.corpus_config}
    if source.corpus is not None:
        named = {"corpus": source.corpus, "corpus_config": source.corpus_config}
    split = settings.split if source.split is None else source.split
    update: dict[str, Any] = {**named, "split": split, "validation": None}
    if source.share is None:
        update |= {"stream": source.stream, "text_field": source.text_field or settings.text_field}
    if source.share is None and source.corpus is not None:
        update |= {"sources": None, "phases": ()}
    other = settings.model_copy(update=update)
    if source.split is not None and not is_on_hub(other):
        raise UserError(
            f"split = {source.split!r} needs a Hugging Face data set, and corpus {other.corpus} is not one: "
            "name the files of that split in data.validation.corpus, or set share"
        )
    is_checked = is_training and source.share is None
    if is_checked and any(_is_trained_on(other, each) for each in sources_of(settings).values()):
        held_out = f"corpus {other.corpus}" if source.split is None else f"{other.corpus}, {other.split},"
        raise UserError(f"{held_out} is the text for training: name other text, or set share")
    return other


def _is_trained_on(held_out: DataSettings, trained: DataSettings) -> bool:
    """Whether the settings show, without opening a corpus, that they have text in common."""
    if held_out.corpus != trained.corpus:
        return False
    if not is_on_hub(trained):
        return True
    configs = {each.corpus_config or DEFAULT_CONFIG for each in (held_out, trained)}
    first, second = (
        split_read(each.split, each.stream, each.max_bad_records) for each in (held_out, trained)
    )
    return len(configs) == 1 and splits_overlap(first, second, {}) is True


def places_of_samples(settings: DataSettings) -> list[str]:
    """Where the samples are: token ids that are read in place, and the cache if it has others, or plans.

    Raises:
        UserError: a corpus is a path that does not exist.
    """
    sources = sources_of(settings).values()
    in_place = [each.corpus for each in sources if source_of(each) is MegatronCorpus]
    places = [f"{', '.join(in_place)} (read in place)"] if in_place else []
    if len(in_place) < len(sources):
        places.append(str(settings.cache_dir))
    elif settings.packing == "best_fit":
        places.append(f"{settings.cache_dir} (plans of best_fit)")
    return places


def is_on_hub(settings: DataSettings) -> bool:
    """Whether the corpus is a Hugging Face data set; opening it may download it. A blend is none.

    Raises:
        UserError: it is a path that does not exist.
    """
    return settings.corpus != BLEND and source_of(settings) is HubCorpus
