"""Text from a Hugging Face data set: any name that `datasets.load_dataset` accepts, downloaded or cached.

The library has its own download cache. This module adds one-line errors and a fingerprint that is equal on
all machines (the library's fingerprint depends on file times). Not covered: streaming, and data sets that run
code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from megalowbit.data.corpus import Corpus
from megalowbit.data.settings import DataSettings, names_files
from megalowbit.errors import UserError, unknown_name

NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
ROWS_IN_FINGERPRINT = 256
ROWS_PER_READ = 1024


class HubCorpus(Corpus):
    """One split of a data set; each row is a document.

    Args:
        dataset_name: name for `load_dataset`.
        config: configuration of the data set, if it has several.
        split: in the library's notation, `"train"` or `"train[:10%]"`.
        text_field: the column with the text.

    Raises:
        UserError: the data set, configuration, split or column does not exist or cannot be reached, or the
            column is not text.
    """

    def __init__(
        self, dataset_name: str, *, config: str | None = None, split: str = "train", text_field: str = "text"
    ) -> None:
        self.dataset_name = dataset_name
        self.config = config
        self.split = split
        self.text_field = text_field
        self._rows = self._load()
        self._num_read = 0

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
        )

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.dataset_name, self.config, self.split) if part)

    @property
    def share_read(self) -> float:
        return self._num_read / max(1, len(self._rows))

    def _load(self) -> Any:
        import datasets  # slow to import, and only this kind of corpus needs it

        try:
            rows = datasets.load_dataset(
                self.dataset_name, self.config, split=self.split, streaming=False, trust_remote_code=False
            )
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            reason = str(error).strip().split("\n")[0]
            raise UserError(
                f"data set {self.name!r} cannot be loaded ({reason}): check corpus, corpus_config, split and "
                "the network, or fill the cache of the datasets library (if you meant a local path, it does "
                "not exist)"
            ) from error
        if self.text_field not in rows.column_names:
            raise UserError(
                f"data set {self.name!r}: {unknown_name('text_field', self.text_field, rows.column_names)}"
            )
        kind = getattr(rows.features[self.text_field], "dtype", "nested")
        if kind not in ("string", "large_string"):
            raise UserError(
                f"data set {self.name!r}: column {self.text_field!r} is {kind}, not text: set text_field"
            )
        return rows.select_columns([self.text_field])

    @cached_property
    def fingerprint(self) -> str:  # it reads rows
        count = len(self._rows)
        digest = hashlib.sha256(f"hub {self.name!r} {self.text_field!r} {count}".encode())
        num_read = min(count, ROWS_IN_FINGERPRINT)
        for number in range(num_read):
            text = self._rows[number * count // num_read][self.text_field] or ""
            digest.update(f"{len(text)}\0{text}".encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        self.bad_records.reset()
        self._num_read = 0
        try:
            for rows in self._rows.iter(batch_size=ROWS_PER_READ):
                texts = [text for text in rows[self.text_field] if text]
                self._num_read += len(rows[self.text_field])
                self.bad_records.empty += len(rows[self.text_field]) - len(texts)
                yield from texts
        except OSError as error:
            raise UserError(
                f"data set {self.name!r} cannot be read ({error}): remove it from the cache of the datasets "
                "library"
            ) from error
