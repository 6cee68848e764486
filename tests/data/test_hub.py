"""Data sets of the datasets library, from folders on disk: rows, fingerprints, bad rows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from quick_cases import every_value, slow_except

from megalowbit.data.cache.build_lock import build_lock
from megalowbit.data.hub import HubCorpus
from megalowbit.data.packing import pack
from megalowbit.data.settings import DataSettings
from megalowbit.data.sources import open_corpus
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.errors import TransientError, UserError

ROWS = [{"text": f"document {number}", "number": number} for number in range(2000)]


def write_dataset(folder, rows):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "test.jsonl").write_text("\n".join(lines[:3]))
    return folder


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A data set as a folder on disk, which `load_dataset` opens without a network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    return write_dataset(tmp_path / "one", ROWS)


def test_a_row_is_a_document(dataset):
    assert list(HubCorpus(str(dataset)).documents()) == [row["text"] for row in ROWS]


def test_splits_are_chosen_in_the_notation_of_the_library(dataset):
    assert len(list(HubCorpus(str(dataset), split="test").documents())) == 3
    assert len(list(HubCorpus(str(dataset), split="train[:10%]").documents())) == 200


def with_row(number, text):
    return [*ROWS[:number], {"text": text, "number": 0}, *ROWS[number + 1 :]]


@every_value(number=[0, 300, 1023, 1024, 1999], text=["changed", "document 30", "", None])
def test_a_change_of_any_row_is_in_the_fingerprint(dataset, number, text):
    first = HubCorpus(str(dataset)).fingerprint
    write_dataset(dataset, with_row(number, text))  # in place: the name stays
    corpus = HubCorpus(str(dataset), max_bad_records=1)
    assert list(corpus.documents()) == [row["text"] for row in with_row(number, text) if row["text"]]
    assert corpus.fingerprint != first


def test_the_fingerprint_is_that_of_the_rows_wherever_they_are(dataset, tmp_path):
    first = HubCorpus(str(dataset)).fingerprint
    copy = write_dataset(tmp_path / "copy", ROWS)
    assert HubCorpus(str(copy)).fingerprint == HubCorpus(str(copy), split="train[:100%]").fingerprint == first
    assert HubCorpus(str(dataset), split="train[:50%]").fingerprint != first
    moved = write_dataset(tmp_path / "moved", [{"text": "ab"}, {"text": "c"}])
    border = write_dataset(tmp_path / "border", [{"text": "a"}, {"text": "bc"}])
    assert HubCorpus(str(moved)).fingerprint != HubCorpus(str(border)).fingerprint


def test_an_edited_data_set_gives_its_new_tokens(dataset, tmp_path):
    def ids():
        settings = {"text_field": "text", "cache_dir": tmp_path / "cache"}
        return pack(HubCorpus(str(dataset), **settings), ByteTokenizer(), 8, tmp_path / "cache").tokens

    assert bytes(ids().tolist()).decode() == "".join(f"{row['text']}\0" for row in ROWS)
    rows = with_row(300, "document 3OO")  # as long as before
    write_dataset(dataset, rows)
    assert bytes(ids().tolist()).decode() == "".join(f"{row['text']}\0" for row in rows)


def test_rows_are_hashed_once(dataset, tmp_path, monkeypatch, caplog):
    first = HubCorpus(str(dataset), cache_dir=tmp_path).fingerprint
    of_half = HubCorpus(str(dataset), cache_dir=tmp_path, split="train[:50%]").fingerprint
    assert first == HubCorpus(str(dataset)).fingerprint != of_half
    monkeypatch.setattr(HubCorpus, "_hash_rows", lambda self: pytest.fail("rows are hashed again"))
    assert HubCorpus(str(dataset), cache_dir=tmp_path).fingerprint == first
    assert HubCorpus(str(dataset), cache_dir=tmp_path, split="train[:50%]").fingerprint == of_half


def test_null_is_not_an_empty_text_in_the_fingerprint(dataset, tmp_path):
    fingerprints = set()
    for name, text in (("null", None), ("empty", "")):
        folder = write_dataset(tmp_path / name, [{"text": "a"}, {"text": text}])
        fingerprints.add(HubCorpus(str(folder), max_bad_records=1).fingerprint)
    assert len(fingerprints) == 2


def test_rows_are_hashed_again_if_the_library_has_written_its_files_again(dataset, tmp_path):
    def opened():
        return HubCorpus(str(dataset), cache_dir=tmp_path / "cache")

    first = opened()
    kept = first.fingerprint
    (file,) = (Path(each["filename"]) for each in first._rows.cache_files)
    content, before = file.read_bytes(), file.stat()
    at = content.index(b"document 1500")
    file.write_bytes(content[:at] + b"DOCUMENT 1500" + content[at + 13 :])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert file.stat().st_size == before.st_size
    assert opened().fingerprint != kept


def test_waiting_for_a_process_that_hashes_the_rows_ends_after_the_timeout(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalCorpus, "is_meant", lambda corpus: False)  # else it is a local folder
    monkeypatch.setattr(HubCorpus, "is_meant", lambda corpus: True)
    more = {"cache_dir": tmp_path / "cache", "build_timeout": 0.2}

    def opened():
        return open_corpus(DataSettings(corpus=str(dataset), sequence_length=8, **more))

    first = opened().fingerprint
    (kept,) = (tmp_path / "cache" / "data_sets").glob("*.txt")
    kept.unlink()
    message = r"still being built by process \d+ on .* after 0\.2 s: raise data\.build_timeout"
    with build_lock(kept, timeout=1), pytest.raises(TransientError, match=message):
        print(opened().fingerprint)
    assert opened().fingerprint == first


@pytest.fixture
def damaged(tmp_path, dataset):
    """A data set in parquet: text, invalid UTF-8, null, nothing, text; a hundred times."""
    values = pyarrow.array([b"first \xc3\xbc", b"\xff\xfe", None, b"", b"last"] * 100, pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(values), values.buffers())
    (tmp_path / "damaged").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "damaged" / "train.parquet")
    return str(tmp_path / "damaged")


@pytest.mark.parametrize("stream", [None, "all"])
def test_bad_rows_are_counted_named_and_left_out_up_to_the_bound(damaged, tmp_path, caplog, stream):
    corpus = HubCorpus(damaged, max_bad_records=200, stream=stream)
    for _ in range(2):
        assert list(corpus.documents()) == ["first ü", "last"] * 100
        assert (corpus.bad_records.count, corpus.bad_records.empty) == (200, 100)
    for row, problem in ((2, "'text' is not UTF-8"), (3, "'text' is null, not text"), (47, "is not UTF-8")):
        assert re.search(rf"left out: data set '{damaged}/train', row {row}: .*{problem}", caplog.text)
    message = r"row 498: 'text' is null, .* \(bad record 200, and data\.max_bad_records is 199\)$"
    with pytest.raises(UserError, match=message):
        list(HubCorpus(damaged, max_bad_records=199, stream=stream).documents())
    with pytest.raises(UserError, match=r"^data set .*train', row 2: 'text' is not UTF-8: convert it$"):
        list(HubCorpus(damaged, stream=stream).documents())
    pack(corpus, ByteTokenizer(), 8, tmp_path / "cache")
    fewer = HubCorpus(damaged, max_bad_records=1, stream=stream)
    with pytest.raises(UserError, match=r"has 200 bad records, and data\.max_bad_records is 1"):
        pack(fewer, ByteTokenizer(), 8, tmp_path / "cache")  # from the cache


def test_settings_reach_the_data_set(damaged, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalCorpus, "is_meant", lambda corpus: False)  # else it is a local folder
    monkeypatch.setattr(HubCorpus, "is_meant", lambda corpus: True)
    more = {"max_bad_records": 7, "stream": 12, "cache_dir": tmp_path / "cache"}
    corpus = open_corpus(DataSettings(corpus=damaged, sequence_length=8, **more))
    assert (corpus.bad_records.limit, corpus.stream) == (7, 12)
    assert list((tmp_path / "cache" / "data_sets").iterdir())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_field": "texts"}, "unknown text_field 'texts': did you mean 'text'"),
        ({"text_field": "number"}, "column 'number' is int64, not text"),
        ({"split": "validation"}, 'Unknown split "validation"'),
        ({"config": "large"}, "BuilderConfig 'large' not found"),
        ({"split": "train[:0]"}, "corresponds to no data"),
    ],
)
def test_a_missing_part_of_a_data_set_is_a_one_line_error(dataset, values, message):
    with pytest.raises(UserError, match=message) as caught:
        HubCorpus(str(dataset), **values)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variable", slow_except(["HF_HUB_OFFLINE"], ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
)
def test_without_a_network_the_error_names_the_data_set_and_the_remedy(tmp_path, variable):
    code = (
        "from megalowbit.data.sources import open_corpus\n"
        "from megalowbit.data.settings import DataSettings\n"
        "from megalowbit.errors import UserError\n"
        "try:\n"
        "    open_corpus(DataSettings(corpus='someone/no-such-data', sequence_length=8))\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    environ = {**os.environ, variable: "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.stdout.startswith("data set 'someone/no-such-data/train' cannot be loaded"), done.stderr
    assert "network" in done.stdout
    assert done.stdout.count("\n") == 1
