"""Local text: `.txt`, `.jsonl` and `.parquet` files, or a folder of them.

A document is a `.txt` file, a line of a `.jsonl` file or a row of a `.parquet` file. A `.txt` file of more
than 16 MiB is divided at line ends into documents of about that size. A longer line or text is divided at a
space, or between two characters if there is no space within 1 MiB. A `.txt` file therefore never has to fit
into memory. A line of `.jsonl` has to, about five times, and so do 1,024 rows of `.parquet`.

Text must be valid UTF-8. The first invalid byte, line or field stops the run with an error that names file
and line, because nobody would notice silently skipped text. Blank lines and empty texts within a file are not
documents.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from megalowbit.data.cache import content_digest
from megalowbit.data.corpus import Corpus
from megalowbit.data.settings import DataSettings
from megalowbit.errors import UserError, unknown_name
from megalowbit.json_text import parse_json

LOCAL_SUFFIXES = (".txt", ".jsonl", ".parquet")
LARGEST_DOCUMENT = 16 * 2**20  # characters; a document may be longer by the rest of its last line
READ_SIZE = 2**20  # bytes; longer lines are read in pieces
SPACES = " \t\n"  # long texts are divided before a space, which tokenizers attach to the next word
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LocalCorpus(Corpus):
    """A file, or all text files below a folder, in the order of their paths.

    `text_field` is the field (jsonl) or column (parquet) with the text.

    Raises:
        UserError: a file is of another kind, is empty or cannot be read, or a folder has no text files.
    """

    def __init__(self, path: Path, *, text_field: str = "text") -> None:
        self.path = path
        self.text_field = text_field
        self.files = tuple(_find_files(path))
        for file in self.files:
            _refuse_unreadable(file)

    @classmethod
    def is_meant(cls, corpus: str) -> bool:
        return Path(corpus).expanduser().exists()

    @classmethod
    def open(cls, settings: DataSettings) -> LocalCorpus:
        return cls(Path(settings.corpus).expanduser(), text_field=settings.text_field)

    @property
    def name(self) -> str:
        return str(self.path)

    @cached_property
    def fingerprint(self) -> str:  # it reads the files
        digest = hashlib.sha256(f"files {self.text_field!r}".encode())
        for file in self.files:
            relative = file.relative_to(self.path).as_posix() if self.path.is_dir() else file.suffix
            digest.update(f"{relative}\0{content_digest(file)}\0".encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        readers = {".txt": _text_documents, ".jsonl": _jsonl_documents, ".parquet": _parquet_documents}
        for file in self.files:
            is_empty = True
            try:
                for document in readers[file.suffix](file, self.text_field):
                    is_empty = False
                    yield document
            except OSError as error:  # from reading: the consumer cannot raise here
                raise _unreadable(file, error) from error
            if is_empty:
                raise UserError(f"corpus file {file} contains no text: remove or replace it")


def _find_files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix not in LOCAL_SUFFIXES:
            raise UserError(
                f"corpus file {path} has an unknown suffix: rename it to one of {', '.join(LOCAL_SUFFIXES)}"
            )
        return [path]
    if not path.is_dir():
        raise UserError(f"corpus {path} is a FIFO, a socket or a device: name a file or a folder")
    files = sorted(_walk(path), key=lambda file: file.relative_to(path).as_posix())
    if not files:
        raise UserError(f"corpus folder {path} has no {', '.join(LOCAL_SUFFIXES)} files: name another")
    for file in files:
        if not file.is_file():
            raise UserError(f"corpus file {file} is not a regular file, or is a dangling link: remove it")
    return files


def _walk(path: Path) -> Iterator[Path]:
    """All files with a suffix of text below a folder, except hidden ones; links to folders are not followed.

    Raises:
        UserError: a folder cannot be read, so its text would be silently missing.
    """

    def refuse(error: OSError) -> None:
        reason = error.strerror or error
        raise UserError(
            f"corpus folder {error.filename} cannot be read ({reason}): fix or remove it"
        ) from error

    for folder, subfolders, names in os.walk(path, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and Path(name).suffix in LOCAL_SUFFIXES:
                yield Path(folder) / name


def _refuse_unreadable(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            is_empty = not opened.read(1)
    except OSError as error:
        raise _unreadable(file, error) from error
    if is_empty:
        raise UserError(f"corpus file {file} is empty: remove or replace it")


def _unreadable(file: Path, error: OSError) -> UserError:
    return UserError(f"corpus file {file} cannot be read ({error.strerror or error}): fix or remove it")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines with their line ends and their numbers, counted from 1."""
    with file.open("rb") as opened:
        for number, line in enumerate(opened, start=1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(file, number, error) from error


def _text_documents(file: Path, _text_field: str) -> Iterator[str]:
    pieces: list[str] = []
    size = line_size = 0
    for piece, is_line_end in _pieces(file):
        pieces.append(piece)
        size += len(piece)
        line_size += len(piece)
        if not is_line_end and line_size >= LARGEST_DOCUMENT:
            *documents, rest = _cut("".join(pieces))
            yield from documents
            pieces, size, line_size = [rest], len(rest), len(rest)
        elif is_line_end:
            line_size = 0
            if size >= LARGEST_DOCUMENT:
                yield "".join(pieces)
                pieces, size = [], 0
    if size:
        yield "".join(pieces)


def _pieces(file: Path) -> Iterator[tuple[str, bool]]:
    """The text of a file in pieces, each with whether it ends a line."""
    decoder, number = codecs.getincrementaldecoder("utf-8")(), 1
    with file.open("rb") as opened:
        if opened.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            opened.seek(0)
        while piece := opened.readline(READ_SIZE):
            is_line_end = piece.endswith(b"\n")
            try:
                yield decoder.decode(piece, final=is_line_end), is_line_end
            except UnicodeDecodeError as error:
                raise _not_utf8(file, number, error) from error
            number += is_line_end
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise _not_utf8(file, number, error) from error


def _cut(text: str) -> Iterator[str]:
    """Divide a text that is too long into documents; the last one may be short. Other texts stay whole."""
    start = 0
    while len(text) - start > LARGEST_DOCUMENT:
        end = start + LARGEST_DOCUMENT
        place = max(text.rfind(space, end - READ_SIZE, end) for space in SPACES)
        place = end if place <= start else place
        yield text[start:place]
        start = place
    yield text[start:]


def _not_utf8(file: Path, number: int, error: UnicodeDecodeError) -> UserError:
    byte = error.object[error.start]
    return UserError(f"corpus file {file}, line {number}: byte {byte:#04x} is not UTF-8: convert the file")


def _jsonl_documents(file: Path, text_field: str) -> Iterator[str]:
    for number, line in _lines(file):
        if not line.strip():
            continue
        where = f"corpus file {file}, line {number}"
        row = parse_json(line.rstrip("\r\n"), f"corpus file {file}", first_line=number)
        if not isinstance(row, dict):
            raise UserError(f"{where}: a {type(row).__name__}, not an object: write {{{text_field!r}: …}}")
        if text_field not in row:
            raise UserError(f"{where}: {unknown_name('text_field', text_field, map(str, row))}")
        text = row[text_field]
        if text is None:
            raise _null(where, text_field)
        if not isinstance(text, str):
            raise UserError(f"{where}: {text_field!r} is a {type(text).__name__}, not text: set text_field")
        if text:
            yield from _cut(_storable(text, where))


def _parquet_documents(file: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            if text_field not in table.schema_arrow.names:
                raise UserError(
                    f"corpus file {file}: {unknown_name('text_field', text_field, table.schema_arrow.names)}"
                )
            kind = table.schema_arrow.field(text_field).type
            values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if values not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                raise UserError(
                    f"corpus file {file}: column {text_field!r} is {kind}, not text: set text_field"
                )
            batches = table.iter_batches(batch_size=1024, columns=[text_field])
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            for row, text in enumerate(texts, start=1):
                if text is None:
                    raise _null(f"corpus file {file}, row {row}", text_field)
                if text:
                    yield from _cut(text)
    except (pyarrow.ArrowException, OSError) as error:  # pyarrow raises OSError for a damaged file
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"corpus file {file} is not a readable parquet file ({reason}): replace it"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"corpus file {file}: column {text_field!r} is not UTF-8: convert it") from error


def _null(where: str, text_field: str) -> UserError:
    return UserError(f"{where}: {text_field!r} is null, not text: remove it or set text_field")


def _storable(text: str, where: str) -> str:
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: lone surrogate {text[error.start]!r} is not text: fix the line") from error
    return text
