"""Text that needs no download: the source code of the running Python's standard library."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from megalowbit.data.corpus import Corpus
from megalowbit.data.settings import DataSettings
from megalowbit.errors import UserError

STDLIB = "stdlib"
# Installed packages differ between installations of the same version; tests are left out as well.
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class StdlibCorpus(Corpus):
    """The `.py` files of the running Python's standard library, without tests: about 12 MB of text.

    Files are sorted by path. Empty files are skipped, and bytes that are not UTF-8 become U+FFFD.

    Args:
        root: folder of the standard library; the default is the running interpreter's.

    Raises:
        UserError: the folder has no sources (a zipped or stripped installation).
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = Path(sysconfig.get_path("stdlib")) if root is None else root
        self.paths = tuple(sorted(self._find(), key=lambda path: path.relative_to(self.root).as_posix()))
        if not self.paths:
            raise UserError(
                f'corpus "{STDLIB}": {self.root} contains no Python sources: name a text file instead'
            )

    @classmethod
    def is_meant(cls, corpus: str) -> bool:
        return corpus == STDLIB

    @classmethod
    def open(cls, _settings: DataSettings, /) -> StdlibCorpus:
        return cls()

    def _find(self) -> Iterator[Path]:
        for folder, subfolders, files in os.walk(self.root, onerror=self._refuse):
            subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB]
            yield from (Path(folder) / name for name in files if name.endswith(".py"))

    def _refuse(self, error: OSError) -> None:
        raise UserError(f'corpus "{STDLIB}": {error.filename} cannot be read ({error.strerror}): fix it')

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
        raise UserError(f"corpus file {path} cannot be read ({error.strerror}): fix it") from error
