"""Documents of `.parquet` and `.arrow` files: one column of text, read in batches of rows.

An `.arrow` file may have either of the two IPC formats: files (Feather 2) or streams, which the datasets
library writes. A bad record is a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from megalowbit.data.corpus import BadRecords
from megalowbit.data.text_files.lines import LARGEST_RECORD, TextFile, cut, null_text, too_large
from megalowbit.errors import UserError, unknown_name

ROWS_PER_READ = 1024
FILE_FORMAT = b"ARROW1"  # what a file of the IPC file format begins with


def parquet_documents(file: TextFile) -> Iterator[str]:
    """The text column of each row of a parquet file."""
    import pyarrow.parquet  # slow to import, and only this kind of file needs it

    with _errors_of(file, "parquet"), pyarrow.parquet.ParquetFile(file.path) as table:
        check_column(_where(file), file.text_field, table.schema_arrow)
        batches = table.iter_batches(batch_size=ROWS_PER_READ, columns=[file.text_field])
        # by name: for "a.b", pyarrow also reads the field b of a column a
        columns = (batch.column(file.text_field) for batch in batches)
        yield from column_documents(columns, file)


def arrow_documents(file: TextFile) -> Iterator[str]:
    """The text column of each row of an arrow file."""
    import pyarrow  # slow to import, and only this kind of file needs it

    with _errors_of(file, "arrow"), pyarrow.memory_map(str(file.path)) as source:
        is_file = source.read(len(FILE_FORMAT)) == FILE_FORMAT
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        check_column(_where(file), file.text_field, reader.schema)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        columns = (batch.column(file.text_field) for batch in batches)
        yield from column_documents(columns, file)


@contextmanager
def _errors_of(file: TextFile, kind: str) -> Iterator[None]:
    """Turn errors of a damaged file into a `UserError`."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:  # pyarrow raises OSError for a damaged file
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"corpus file {file.path} is not a readable {kind} file ({reason}): replace it"
        ) from error


def _where(file: TextFile) -> str:
    return f"corpus file {file.path}"


def check_column(table: str, name: str, schema: Any) -> None:
    """Check that a table has a column `name` of text.

    Args:
        table: names the table in messages.
        name: of the column.
        schema: of the table, Arrow's.

    Raises:
        UserError: it has not.
    """
    import pyarrow

    if name not in schema.names:
        raise UserError(f"{table}: {unknown_name('text_field', name, schema.names)}")
    if schema.names.count(name) > 1:
        raise UserError(f"{table}: {schema.names.count(name)} columns are named {name!r}: rename them")
    kind = schema.field(name).type
    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if values not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise UserError(f"{table}: column {name!r} is {kind}, not text: set text_field")


class Table(Protocol):
    """What has rows: a file or a data set.

    Attributes:
        text_field: the column with the text.
        record: the last row that was read.
    """

    text_field: str
    record: str

    @property
    def bad_records(self) -> BadRecords:
        """Counts the rows that are left out."""

    @property
    def place(self) -> str | None:
        """The table and its last row, for messages."""


def column_documents(columns: Iterator[Any], table: Table) -> Iterator[str]:
    """The documents in successive pieces of a column of `table`, as Arrow arrays."""
    bad_records, text_field, row = table.bad_records, table.text_field, 0
    for column in columns:
        for start in range(0, len(column), ROWS_PER_READ):
            for text in _texts(column.slice(start, ROWS_PER_READ)):
                row += 1
                table.record = f"row {row}"
                where = str(table.place)
                if text is None:
                    bad_records.add(null_text(where, text_field))
                elif isinstance(text, UnicodeDecodeError):
                    bad_records.add(UserError(f"{where}: {text_field!r} is not UTF-8: convert it"))
                elif len(text) > LARGEST_RECORD:
                    bad_records.add(too_large(where))
                elif text:
                    yield from cut(text)
                else:
                    bad_records.empty += 1


def _texts(column: Any) -> list[str | UnicodeDecodeError | None]:
    """The values of a column; where one is not UTF-8, its error."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_text_or_error(value) for value in column]


def _text_or_error(value: Any) -> str | UnicodeDecodeError | None:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return error
