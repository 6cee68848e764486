"""Arrow files of both formats, and bad rows."""

import logging

import datasets
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from megalowbit.data.text_files import lines, tables
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.errors import UserError

TEXTS = [f"document {number} é" for number in range(2500)]


def documents(path, **values):
    return list(LocalCorpus(path, **values).documents())


def write_file(path, table):
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=900)


def write_stream(path, table):
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=900)


WRITERS = {
    "file": write_file,
    "stream": write_stream,
    "compressed": lambda path, table: pyarrow.feather.write_feather(table, str(path), compression="zstd"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_both_formats_of_arrow_files_are_read(tmp_path, kind):
    WRITERS[kind](tmp_path / "a.arrow", pyarrow.table({"number": range(2500), "body": TEXTS}))
    assert documents(tmp_path / "a.arrow", text_field="body") == TEXTS
    with pytest.raises(UserError, match=r"a\.arrow: unknown text_field 'text'"):
        documents(tmp_path / "a.arrow")
    with pytest.raises(UserError, match=r"a\.arrow: column 'number' is int64, not text"):
        documents(tmp_path / "a.arrow", text_field="number")


def test_a_data_set_that_was_saved_to_disk_is_a_folder_of_arrow_files(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved", num_shards=3)
    assert documents(tmp_path / "saved") == TEXTS


@pytest.mark.parametrize("order", [("a", "a.b"), ("a.b", "a")])
def test_a_column_with_a_dot_in_its_name_is_no_field_of_another(tmp_path, order):
    columns = {"a": [{"b": "field"}], "a.b": ["column"]}
    pyarrow.parquet.write_table(
        pyarrow.table({name: columns[name] for name in order}), tmp_path / "a.parquet"
    )
    assert documents(tmp_path / "a.parquet", text_field="a.b") == ["column"]


def test_two_columns_of_the_same_name_are_refused(tmp_path):
    table = pyarrow.table([["x"], ["y"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: 2 columns are named 'text': rename them"):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize("content", [b"nothing", b"ARROW1 and no more", b"\xff\xff\xff\xff\x10\0\0\0"])
def test_a_damaged_arrow_file_is_named(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.arrow is not a readable arrow file") as caught:
        documents(tmp_path / "a.arrow")
    assert "\n" not in str(caught.value)


def write_parquet(path, table):
    pyarrow.parquet.write_table(table, path)


@pytest.mark.parametrize(("suffix", "write"), [(".arrow", write_file), (".parquet", write_parquet)])
def test_bad_rows_are_left_out_counted_and_named(tmp_path, monkeypatch, caplog, suffix, write):
    monkeypatch.setattr(tables, "LARGEST_RECORD", 1000)
    monkeypatch.setattr(lines, "LARGEST_RECORD", 1000)
    rows = [text.encode() for text in TEXTS]
    rows[3], rows[1500], rows[1501], rows[2000] = None, b"\xff", b"", b"x" * 1001
    column = pyarrow.array(rows, pyarrow.binary()).view(pyarrow.string())
    path = tmp_path / f"a{suffix}"
    write(path, pyarrow.table({"text": column}))
    corpus = LocalCorpus(path, max_bad_records=3)
    with caplog.at_level(logging.WARNING):
        assert list(corpus.documents()) == [
            text for number, text in enumerate(TEXTS) if number not in (3, 1500, 1501, 2000)
        ]
    assert (corpus.bad_records.count, corpus.bad_records.empty) == (3, 1)
    for place in (
        "row 4: 'text' is null",
        "row 1501: 'text' is not UTF-8",
        "row 2001: more than 1,000 bytes",
    ):
        assert f"corpus file {path}, {place}" in caplog.text
    with pytest.raises(UserError, match=r"row 2001: more than 1,000 bytes.* \(bad record 3, and .* is 2\)"):
        documents(path, max_bad_records=2)
