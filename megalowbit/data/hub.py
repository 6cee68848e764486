"""Text from a Hugging Face data set: any name that `datasets.load_dataset` accepts, downloaded or streamed.

A data set is downloaded into the library's own cache, or (`stream`) read once from the network. Both are read
as Arrow tables, in the order of the rows, with the rules of local files for bad records.

The fingerprint of a downloaded data set is a hash of the text of all its rows, equal on all machines. It is
kept in the cache folder under paths, sizes and times of the library's files. Not noticed: a change of such a
file that keeps its size and its time. A stream cannot be hashed before it is read; its fingerprint is that of
its origin: the files of the data set and the commit (on other servers the ETag, on disks the time) that they
have. Not noticed there: a file on a disk or another server that changes without those.

Not covered: data sets that run code.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megalowbit.data.cache.built_files import WAIT_SECONDS, cached_file
from megalowbit.data.cache.digests import digest_of, key_of
from megalowbit.data.corpus import BadRecords, Corpus
from megalowbit.data.settings import DataSettings, names_files
from megalowbit.data.text_files.tables import check_column, column_documents
from megalowbit.durable_files import atomic_file
from megalowbit.errors import TransientError, UserError
from megalowbit.json_text import read_json_object

logger = logging.getLogger(__name__)

NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
ROWS_PER_READ = 1024
FINGERPRINTS = "data_sets"  # folder in the cache
DEFAULT_CONFIG = "default"  # the library's name of the configuration of a data set that names none
LONG_SPLIT = 10**15  # rows, a multiple of 100: stands for a length that is not known


class HubCorpus(Corpus):
    """One split of a data set; each row is a document.

    Args:
        dataset_name: name for `load_dataset`.
        config: configuration of the data set, if it has several.
        split: in the library's notation, `"train"` or `"train[:10%]"`.
        text_field: the column with the text.
        max_bad_records: how many rows may be left out because they are not text.
        stream: read it from the network without a copy: `"all"` documents, or only the first so many.
        cache_dir: folder of the cache, where fingerprints are kept; None: they are not.
        timeout: seconds to wait for another process that hashes the same rows.

    Raises:
        UserError: the data set, configuration, split or column does not exist or cannot be reached, or the
            column is not text.
    """

    def __init__(
        self,
        dataset_name: str,
        *,
        config: str | None = None,
        split: str = "train",
        text_field: str = "text",
        max_bad_records: int = 0,
        stream: int | Literal["all"] | None = None,
        cache_dir: Path | None = None,
        timeout: float = WAIT_SECONDS,
    ) -> None:
        self.dataset_name = dataset_name
        self.config = config
        self.split = split
        self.text_field = text_field
        self.stream = stream
        self.bad_records = BadRecords(max_bad_records)
        self.record = "row 1"
        self._cache_dir, self._timeout = cache_dir, timeout
        self._num_read = 0
        if stream is None:
            self._rows = self._load()
        else:
            self._open_stream()

    @classmethod
    def is_meant(cls, corpus: str) -> bool:
        return not names_files(corpus) and NAME.fullmatch(corpus) is not None

    @classmethod
    def open(cls, settings: DataSettings) -> HubCorpus:
        return cls(
            settings.corpus,
            config=settings.corpus_config,
            split=settings.split,
            text_field=settings.text_field,
            max_bad_records=settings.max_bad_records,
            stream=settings.stream,
            cache_dir=settings.cache_dir,
            timeout=settings.build_timeout,
        )

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.dataset_name, self.config, self.split) if part)

    @property
    def config_name(self) -> str:
        """The configuration; if none is named, the one that the library has chosen."""
        chosen = None if self._rows is None else self._rows.info.config_name
        return chosen or self.config or DEFAULT_CONFIG

    @property
    def split_lengths(self) -> dict[str, int]:
        """Rows of each split of a downloaded data set; of a stream, only its authors say."""
        splits = None if self.stream is not None else self._rows.info.splits
        return {name: each.num_examples for name, each in (splits or {}).items() if each.num_examples}

    @property
    def place(self) -> str:
        return f"data set {self.name!r}, {self.record}"

    @property
    def share_read(self) -> float | None:
        if self.stream is None:
            return self._num_read / max(1, len(self._rows))
        return None if self.stream == "all" else min(1.0, self._num_read / self.stream)

    def _load(self) -> Any:
        """The rows, downloaded if need be."""
        import datasets  # slow to import, and only this kind of corpus needs it

        try:
            rows = datasets.load_dataset(
                self.dataset_name, self.config, split=self.split, streaming=False, trust_remote_code=False
            )
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise self._not_loaded(error) from error
        self._check(rows)
        return rows.select_columns([self.text_field])

    def _open_stream(self) -> None:
        """Find out what the data set consists of; without a network, what it consisted of before."""
        import datasets

        try:
            builder = datasets.load_dataset_builder(self.dataset_name, self.config)
            files = builder.config.data_files
            if not files:  # without a network the library offers what it has downloaded, if anything
                raise ConnectionError("only a downloaded copy is at hand")
            self._rows = builder.as_streaming_dataset(split=self.split)
        except OSError as error:
            self._rows, self._origin = None, self._known_origin()
            if self._origin is None:
                raise self._not_loaded(error) from error
            logger.warning(
                "data set %s cannot be reached (%s): only tokens of what it was before are used",
                self.name,
                _reason(error),
            )
            return
        except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise self._not_loaded(error) from error
        self._check(self._rows)
        origin = {str(split): (list(found), found.origin_metadata) for split, found in files.items()}
        self._origin = hashlib.sha256(json.dumps(origin).encode()).hexdigest()
        self._keep_origin(self._origin)

    def _not_loaded(self, error: Exception) -> UserError:
        return UserError(
            f"data set {self.name!r} cannot be loaded ({_reason(error)}): check corpus, corpus_config, split "
            "and the network, or fill the cache of the datasets library (if you meant a local path, it does "
            "not exist)"
        )

    def _check(self, rows: Any) -> None:
        """Check that the column exists and is text, if the library knows its columns before it reads."""
        if rows.features is not None:
            check_column(f"data set {self.name!r}", self.text_field, rows.features.arrow_schema)

    @property
    def _origin_file(self) -> Path | None:
        name = f"stream-{key_of((self.dataset_name, self.config))}.json"
        return self._cache_dir and self._cache_dir / FINGERPRINTS / name

    def _known_origin(self) -> str | None:
        """What `_keep_origin` has kept; None if there is nothing."""
        file = self._origin_file
        if file is None or not file.exists():
            return None
        try:
            origin = read_json_object(file).get("origin")
        except UserError as error:
            logger.warning("%s: what data set %s consisted of before is not known", error, self.name)
            return None
        return origin if isinstance(origin, str) else None

    def _keep_origin(self, origin: str) -> None:
        file = self._origin_file
        if file is None or self._known_origin() == origin:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as note:
                json.dump({"data_set": self.dataset_name, "origin": origin}, note)
        except OSError as error:  # the tokens may be there already; if not, their error names the remedy
            logger.warning(
                "%s cannot be written (%s): without a network, data set %s will not be found in the cache",
                file,
                error.strerror or error,
                self.name,
            )

    @cached_property
    def fingerprint(self) -> str:  # it reads the rows
        if self.stream is not None:
            stream = ("stream", self._origin, self.config, self.split, self.text_field, self.stream)
            return digest_of(stream)
        files = [Path(file["filename"]) for file in self._rows.cache_files]
        if self._cache_dir is None or not files:
            return self._hash_rows()
        facts = [(str(file), (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
        parts = (facts, self.dataset_name, self.config, self.split, self.text_field, len(self._rows))
        key = key_of(parts)

        def write(draft: Path) -> None:
            logger.info("hashing the text of %s, once", self.name)
            draft.write_text(self._hash_rows(), encoding="utf-8")

        kept = cached_file(self._cache_dir / FINGERPRINTS / f"{key}.txt", write, timeout=self._timeout)
        return kept.read_text(encoding="utf-8")

    def _hash_rows(self) -> str:
        """SHA-256 of the length and the text of every row; null has the length -1."""
        import pyarrow

        digest = hashlib.sha256(b"data set")
        for column in self._columns():
            values = column.cast(pyarrow.large_binary())
            lengths = pyarrow.compute.binary_length(values).fill_null(-1)
            digest.update(lengths.to_numpy().astype("<i8").tobytes())
            for chunk in values.fill_null(b"").chunks:
                _, offsets, content = chunk.buffers()
                ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
                if content is not None and len(chunk):
                    digest.update(memoryview(content)[ends[0] : ends[-1]])
        return digest.hexdigest()

    def _columns(self) -> Iterator[Any]:
        """The text of the rows, `ROWS_PER_READ` at a time, as Arrow columns.

        Raises:
            UserError: they cannot be read, or a file of a stream has no such column of text.
        """
        if self._rows is None:
            raise UserError(
                f"data set {self.name!r} cannot be reached, and its tokens are not in {self._cache_dir}: "
                "check the network, or run --prepare-data where there is one"
            )
        num_rows, tables = 0, self._rows.with_format("arrow").iter(batch_size=ROWS_PER_READ)
        while True:
            try:
                table = next(tables, None)
            except MemoryError:  # not the data set's fault
                raise
            except Exception as error:  # datasets, fsspec, pyarrow and clients of HTTP have many kinds
                raise self._not_read(error, num_rows) from error
            if table is None:
                return
            check_column(f"data set {self.name!r}", self.text_field, table.schema)
            num_rows += table.num_rows
            yield table[self.text_field]

    def _not_read(self, error: Exception, num_rows: int) -> UserError:
        where = f"data set {self.name!r} cannot be read after row {num_rows} ({_reason(error)})"
        if self.stream is None:
            return UserError(f"{where}: remove it from the cache of the datasets library")
        if isinstance(error, OSError):
            return TransientError(f"{where}: check the network and start again")
        return UserError(f"{where}: fix the data set, or name another")

    def documents(self) -> Iterator[str]:
        self.bad_records.reset()
        self._num_read = 0
        found = column_documents(self._counted(), self)
        if self.stream is None or self.stream == "all":
            yield from found
            return
        for document in itertools.islice(found, self.stream):
            self._num_read += 1
            yield document

    def _counted(self) -> Iterator[Any]:
        for column in self._columns():
            if self.stream is None:
                self._num_read += len(column)
            yield column


def split_read(split: str, stream: int | Literal["all"] | None, max_bad_records: int) -> str:
    """The part of a split that has the rows read, in the library's notation, unless rows are empty.

    A stream of so many documents has so many first rows if none of them is left out.
    """
    is_part = isinstance(stream, int) and not max_bad_records and re.fullmatch(r"\w+", split) is not None
    return f"{split}[:{stream}]" if is_part else split


def splits_overlap(one: str, other: str, lengths: Mapping[str, int]) -> bool | None:
    """Whether two splits of a data set have rows in common; None: that depends on lengths not known.

    Args:
        one: in the library's notation: `"train"`, `"train+test"`, `"train[:10%]"`, `"all"`.
        other: likewise.
        lengths: rows of splits, by name; may be empty.

    Raises:
        UserError: one of them is not in that notation.
    """
    found = [_parts_overlap(*pair, lengths) for pair in itertools.product(_parts(one), _parts(other))]
    return True if True in found else None if None in found else False


def _parts(split: str) -> list[str]:
    return [part.strip() for part in split.split("+")]


def _parts_overlap(one: str, other: str, lengths: Mapping[str, int]) -> bool | None:
    """`splits_overlap` of splits without `+`."""
    name, other_name = (re.split(r"[\[(]", part)[0] for part in (one, other))
    if "all" in (name, other_name):
        return True
    if name != other_name:
        return False
    is_whole = "[" not in one or "[" not in other
    # slices in the same unit, counted from the beginning, are ordered in the same way whatever the length is
    is_comparable = not re.search(r"[-(]", one + other) and ("%" in one) == ("%" in other)
    if name not in lengths and not (is_whole or is_comparable):
        return None
    import datasets

    known = {name: lengths.get(name, LONG_SPLIT)}
    try:
        rows, others = (
            datasets.ReadInstruction.from_spec(part).to_absolute(known)[0] for part in (one, other)
        )
    except (ValueError, AssertionError) as error:
        raise UserError(f"split {one!r} or {other!r} is not one of the library: {_reason(error)}") from error
    return max(rows.from_, others.from_) < min(rows.to, others.to)


def _reason(error: Exception) -> str:
    """The first line of another library's message, or of that of its cause, which some leave out."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text = str(error).strip() or str(cause).strip() or type(error).__name__
    if error.__cause__ is not None and str(cause).strip():
        text = f"{text.splitlines()[0]}: {str(cause).strip()}"
    return text.splitlines()[0]
