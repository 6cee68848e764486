"""Where the text comes from: the running Python's own sources, local files, or a Hugging Face data set.

A corpus is an iterator of documents and a fingerprint of what they are; the same fingerprint means the same
documents in the same order. `open_corpus` decides by one rule: `"stdlib"`; else a name that ends in .txt,
.jsonl or .parquet or that exists is local; else it is the name of a data set. Local files stand in
`local_files`, data sets in `hub`. Not covered: streaming data sets, mixtures of several corpora.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from megalowbit.data.settings import DataSettings
from megalowbit.errors import UserError

STDLIB = "stdlib"
LOCAL_SUFFIXES = (".txt", ".jsonl", ".parquet")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
# Installed packages and the tests: what differs between installations of one version, and what is not prose.
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


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


class StdlibCorpus(Corpus):
    """The `.py` files of the running Python's standard library, without tests: about 12 MB of text.

    Needs no download, so a first run works anywhere. Files are sorted by path; empty ones are skipped and
    bytes that are not UTF-8 become U+FFFD.

    Args:
        root: folder of the standard library; the default is the running interpreter's.

    Raises:
        UserError: there are no sources in it (a zipped or stripped installation).
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = Path(sysconfig.get_path("stdlib")) if root is None else root
        self.paths = tuple(sorted(self._find(), key=lambda path: path.relative_to(self.root).as_posix()))
        if not self.paths:
            raise UserError(
                f'corpus "{STDLIB}": there are no Python sources in {self.root}: name a text file instead'
            )

    def _find(self) -> Iterator[Path]:
        for folder, subfolders, files in os.walk(self.root, onerror=self._refuse):
            subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB]
            yield from (Path(folder) / name for name in files if name.endswith(".py"))

    def _refuse(self, error: OSError) -> None:
        raise UserError(f'corpus "{STDLIB}": {error.filename} cannot be read ({error.strerror}): mend it')

    @property
    def name(self) -> str:
        return STDLIB

    @cached_property
    def fingerprint(self) -> str:  # it reads every file
        digest = hashlib.sha256(f"{STDLIB} of Python {sys.version_info[:3]}".encode())
        for path in self.paths:
            content = _bytes_of(path)
            digest.update(f"{path.relative_to(self.root).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        for path in self.paths:
            text = _bytes_of(path).decode("utf-8", errors="replace")
            if text:
                yield text


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"corpus file {path} cannot be read ({error.strerror}): mend it") from error


def open_corpus(settings: DataSettings) -> Corpus:
    """The corpus `settings` names.

    Raises:
        UserError: no such file or folder, nothing usable in it, or no such data set.
    """
    # Imported at use: each kind brings its own reader, and both build on this module.
    from megalowbit.data.hub import HubCorpus
    from megalowbit.data.local_files import LocalCorpus

    if is_on_hub(settings):
        return HubCorpus(
            settings.corpus,
            config=settings.corpus_config,
            split=settings.split,
            text_field=settings.text_field,
        )
    if settings.corpus == STDLIB:
        return StdlibCorpus()
    return LocalCorpus(Path(settings.corpus).expanduser(), text_field=settings.text_field)


def is_on_hub(settings: DataSettings) -> bool:
    """Whether the corpus is a Hugging Face data set, so that opening it may download it.

    Raises:
        UserError: it is a path, and nothing is there.
    """
    path = Path(settings.corpus).expanduser()
    if settings.corpus == STDLIB or path.exists():
        return False
    if path.suffix in LOCAL_SUFFIXES or not HUB_NAME.fullmatch(settings.corpus):
        raise UserError(
            f"corpus {settings.corpus!r} does not exist: "
            f'name a {", ".join(LOCAL_SUFFIXES)} file, a folder of them, "{STDLIB}" or a data set'
        )
    return True
