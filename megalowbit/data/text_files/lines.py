"""Documents of `.txt` and `.jsonl` files, which may be compressed.

A `.txt` file of more than 16 MiB is divided at line ends into documents of about that size. A longer line or
text is divided at a space, or between two characters if there is no space within 1 MiB. A `.txt` file
therefore never has to fit into memory. A line of `.jsonl` has to, about five times.

A bad record is a document of a `.txt` file, or a line of a `.jsonl` file.
"""

from __future__ import annotations

import codecs
import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megalowbit.data.corpus import BadRecords
from megalowbit.data.settings import compression_of
from megalowbit.errors import UserError, unknown_name
from megalowbit.json_text import parse_json

LARGEST_DOCUMENT = 16 * 2**20  # characters; a document may be longer by the rest of its last line
LARGEST_RECORD = 256 * 2**20  # bytes of a line or characters of a row; parsing takes several times as much
READ_SIZE = 2**20  # bytes; longer lines are read in pieces
SPACES = " \t\n"  # long texts are divided before a space, which tokenizers attach to the next word
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass
class TextFile:
    """A file that is read.

    Attributes:
        path: its path.
        text_field: the field or column with the text.
        bad_records: counts what is left out.
        record: where the last document is in the file: a line or a row.
    """

    path: Path
    text_field: str
    bad_records: BadRecords
    record: str = field(default="line 1", init=False)
    _raw: IO[bytes] | None = field(default=None, init=False)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def place(self) -> str:
        """Where the last document is, for messages."""
        return f"corpus file {self.path}, {self.record}"

    @property
    def bytes_read(self) -> int:
        """How much of the file, compressed as it is, has been read; 0 if that is not known."""
        return 0 if self._raw is None or self._raw.closed else self._raw.tell()

    @contextmanager
    def open(self) -> Iterator[io.BufferedReader]:
        """Open for reading decompressed bytes; concatenated streams are read one after another."""
        with self.path.open("rb") as raw:
            self._raw = raw
            compression = compression_of(self.path)
            if compression == ".gz":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield io.BufferedReader(file, READ_SIZE)
            elif compression == ".zst":
                with zstd_stream(raw) as file:
                    yield io.BufferedReader(file, READ_SIZE)
            else:
                yield raw


def zstd_stream(raw: IO[bytes]) -> Any:
    """Decompress with pyarrow, because Python 3.13 and older have no module for zstd."""
    import pyarrow  # slow to import, and only this kind of file needs it

    return pyarrow.CompressedInputStream(raw, "zstd")


def text_documents(file: TextFile) -> Iterator[str]:
    """The text of a `.txt` file, as one document or in parts."""
    pieces: list[str] = []
    size = line_size = 0
    line, is_bad = 1, False
    for piece, is_line_end in _pieces(file):
        line += is_line_end
        if isinstance(piece, UserError):
            if not is_bad:
                file.bad_records.add(piece)
            is_bad, pieces = True, []
            continue
        if not is_bad:
            pieces.append(piece)
        size += len(piece)
        line_size += len(piece)
        if not is_line_end and line_size >= LARGEST_DOCUMENT:
            *documents, rest = cut("".join(pieces))
            yield from documents
            file.record = f"line {line}"  # where the rest begins
            pieces, size, line_size, is_bad = [rest], len(rest), len(rest), False
        elif is_line_end:
            line_size = 0
            if size >= LARGEST_DOCUMENT:
                if not is_bad:
                    yield "".join(pieces)
                file.record = f"line {line}"
                pieces, size, is_bad = [], 0, False
    if size and not is_bad:
        yield "".join(pieces)


def _pieces(file: TextFile) -> Iterator[tuple[str | UserError, bool]]:
    """The text of a file in pieces, or the error of a piece, each with whether it ends a line."""
    decoder, number = codecs.getincrementaldecoder("utf-8")(), 1
    with file.open() as opened:
        if opened.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
            opened.read(len(BYTE_ORDER_MARK))
        while piece := opened.readline(READ_SIZE):
            is_line_end = piece.endswith(b"\n")
            try:
                yield decoder.decode(piece, final=is_line_end), is_line_end
            except UnicodeDecodeError as error:
                decoder.reset()
                yield _not_utf8(file.path, number, error), is_line_end
            number += is_line_end
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            yield _not_utf8(file.path, number, error), True


def cut(text: str) -> Iterator[str]:
    """Divide a text that is too long into documents; the last one may be short. Other texts stay whole."""
    start = 0
    while len(text) - start > LARGEST_DOCUMENT:
        end = start + LARGEST_DOCUMENT
        place = max(text.rfind(space, end - READ_SIZE, end) for space in SPACES)
        place = end if place <= start else place
        yield text[start:place]
        start = place
    yield text[start:]


def jsonl_documents(file: TextFile) -> Iterator[str]:
    """The text field of each line."""
    for number, line in _lines(file):
        file.record = f"line {number}"
        try:
            text = None if isinstance(line, bytes) and not line.strip() else _text_of(file, number, line)
        except UserError as error:
            file.bad_records.add(error)
            continue
        if text:
            yield from cut(text)
        elif text is not None:
            file.bad_records.empty += 1


def _lines(file: TextFile) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their line ends and their numbers, counted from 1; None for a line that is too long."""
    number = 0
    with file.open() as opened:
        while line := opened.readline(LARGEST_RECORD + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if len(line) > LARGEST_RECORD and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = opened.readline(READ_SIZE)
                yield number, None
            else:
                yield number, line


def _text_of(file: TextFile, number: int, line: bytes | None) -> str:
    """The text in a line of JSON.

    Raises:
        UserError: there is none; the message names file and line.
    """
    where, text_field = f"corpus file {file.path}, line {number}", file.text_field
    if line is None:
        raise too_large(where)
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(file.path, number, error) from error
    row = parse_json(decoded.rstrip("\r\n"), f"corpus file {file.path}", first_line=number)
    if not isinstance(row, dict):
        raise UserError(f"{where}: a {type(row).__name__}, not an object: write {{{text_field!r}: …}}")
    if text_field not in row:
        raise UserError(f"{where}: {unknown_name('text_field', text_field, map(str, row))}")
    text = row[text_field]
    if text is None:
        raise null_text(where, text_field)
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_field!r} is a {type(text).__name__}, not text: set text_field")
    return _storable(text, where)


def _not_utf8(file: Path, number: int, error: UnicodeDecodeError) -> UserError:
    byte = error.object[error.start]
    return UserError(
        f"corpus file {file}, line {number}: byte {byte:#04x} is not UTF-8: convert the file, or leave such "
        "records out with data.max_bad_records"
    )


def null_text(where: str, text_field: str) -> UserError:
    """The error for a record whose text is null."""
    return UserError(f"{where}: {text_field!r} is null, not text: remove it or set text_field")


def too_large(where: str) -> UserError:
    """The error for a record that does not fit into memory."""
    return UserError(f"{where}: more than {LARGEST_RECORD:,} bytes: divide the text into documents")


def _storable(text: str, where: str) -> str:
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: lone surrogate {text[error.start]!r} is not text: fix the line") from error
    return text
