"""Compressed files, and records that are left out, against files that this test writes with other tools."""

import gzip
import json
import logging
import os

import pyarrow
import pytest

from megalowbit.data.packing import pack
from megalowbit.data.settings import DataSettings, kind_of
from megalowbit.data.sources import open_corpus
from megalowbit.data.text_files import lines
from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.errors import UserError

TEXTS = [f"document {number} é" for number in range(500)]
JSON_LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zstd(content):
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


COMPRESS = {".gz": gzip.compress, ".zst": zstd}


def documents(path, **values):
    return list(LocalCorpus(path, **values).documents())


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_is_that_of_the_plain_file(tmp_path, suffix):
    compress = COMPRESS[suffix]
    half = JSON_LINES.index(b"\n", len(JSON_LINES) // 2) - 7  # streams may be concatenated, also within lines
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(JSON_LINES[:half]) + compress(JSON_LINES[half:]))
    (tmp_path / f"b.json{suffix}").write_bytes(compress(b'\xef\xbb\xbf{"text": "two"}'))
    (tmp_path / f"c.txt{suffix}").write_bytes(compress("\ufeffdrei\r\nünd".encode()))
    (tmp_path / f"d.parquet{suffix}").write_bytes(compress(b"not read"))
    (tmp_path / "dataset_info.json").write_text("{}")
    assert documents(tmp_path) == [*TEXTS, "two", "drei\r\nünd"]
    assert documents(tmp_path / f"a.jsonl{suffix}") == TEXTS


# without a checksum in the file, zstd may decompress a flipped byte
@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(".gz", "cut"), (".gz", "flip"), (".gz", "plain"), (".zst", "cut"), (".zst", "plain")],
)
def test_a_damaged_compressed_file_is_named(tmp_path, suffix, damage):
    content = bytearray(COMPRESS[suffix](JSON_LINES))
    path = tmp_path / f"a.jsonl{suffix}"
    content[len(content) // 2] ^= damage == "flip" and 0xFF
    path.write_bytes({"cut": content[:-9], "flip": content, "plain": JSON_LINES}[damage])
    with pytest.raises(
        UserError, match=r"a\.jsonl\.(gz|zst)(, line \d+: | is not JSON| cannot be read \()"
    ) as caught:
        documents(path)
    assert "\n" not in str(caught.value)


def test_a_compressed_file_is_read_as_a_stream(tmp_path):
    texts = [os.urandom(20_000).hex() for _ in range(100)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(content))
    corpus = LocalCorpus(tmp_path / "a.jsonl.zst")
    assert corpus.share_read == 0
    shares = []
    for text, expected in zip(corpus.documents(), texts, strict=True):
        assert text == expected
        shares.append(corpus.share_read)
    assert shares == sorted(shares)
    assert len(set(shares)) > 2  # READ_SIZE holds some 25 of them
    assert corpus.share_read == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", ".txt"), ("a.txt.gz", ".txt"), ("a.jsonl.zst", ".jsonl"), ("a.json.gz", ".jsonl"),
        ("a.json", None), ("a.gz", None), ("a.parquet.gz", None), ("a.arrow", ".arrow"), ("a.csv", None),
    ],
)  # fmt: skip
def test_the_name_of_a_file_says_its_kind(name, kind):
    assert kind_of(name) == kind


BAD_LINES = {
    "not UTF-8": b'{"text": "\xff"}',
    "not JSON": b'{"text": ',
    "no object": b"[1]",
    "no field": b'{"body": "x"}',
    "null": b'{"text": null}',
    "NaN": b'{"text": NaN}',
    "number": b'{"text": 3}',
    "lone surrogate": b'{"text": "\\ud800"}',
    "nested": b"[" * 100_000,
    "too large": b'{"text": "' + b"x" * 2000 + b'"}',
}


@pytest.fixture
def small_records(monkeypatch):
    monkeypatch.setattr(lines, "LARGEST_RECORD", 1000)


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_left_out_counted_and_named(tmp_path, small_records, caplog, kind):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "one"}', BAD_LINES[kind], b'{"text": ""}', b'{"text": "two"}']))
    with pytest.raises(UserError) as alone:
        documents(path)
    corpus = LocalCorpus(path, max_bad_records=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # each reading counts for itself
            assert list(corpus.documents()) == ["one", "two"]
            assert (corpus.bad_records.count, corpus.bad_records.empty) == (1, 1)
    assert f"left out: {alone.value} (bad record 1 of at most 1)" in caplog.messages
    assert "line 2" in str(alone.value) or "integer" in str(alone.value)


def test_one_bad_record_more_than_allowed_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "one"}', *BAD_LINES.values()]))
    with pytest.raises(UserError, match=r"line 4: a list, not an object.* \(bad record 3, and .* is 2\)"):
        documents(path, max_bad_records=2)
    assert documents(path, max_bad_records=len(BAD_LINES) - 1) == ["one", "x" * 2000]  # within the real limit


def test_only_the_first_bad_records_are_named(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + b"{\n" * 100)
    with caplog.at_level(logging.WARNING):
        assert documents(path, max_bad_records=100) == ["one"]
    assert sum("left out" in message for message in caplog.messages) == 20
    assert caplog.messages[-1] == "further bad records are counted, but not named"


def test_a_text_file_that_is_not_utf8_is_one_bad_record(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(b"fine\nb\xffd\nand \xfe again\nfine")
    (tmp_path / "b.txt").write_bytes(b"good")
    (tmp_path / "c.txt").write_bytes(b"ends within a character \xc3")
    corpus = LocalCorpus(tmp_path, max_bad_records=2)
    with caplog.at_level(logging.WARNING):
        assert list(corpus.documents()) == ["good"]
    assert corpus.bad_records.count == 2
    assert "a.txt, line 2: byte 0xff is not UTF-8" in caplog.text
    assert "c.txt, line 1: byte 0xc3 is not UTF-8" in caplog.text


def test_a_bad_part_of_a_large_text_file_does_not_take_the_others_along(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LARGEST_DOCUMENT", 50)
    monkeypatch.setattr(lines, "READ_SIZE", 16)
    content = b"".join(b"line %03d\n" % number for number in range(60))
    (tmp_path / "a.txt").write_bytes(content.replace(b"line 013", b"line \xff13"))
    corpus = LocalCorpus(tmp_path / "a.txt", max_bad_records=1)
    found = "".join(corpus.documents())
    lost = {number for number in range(60) if f"line {number:03d}\n" not in found}
    assert 13 in lost
    assert max(lost) - min(lost) < 8
    assert "".join(f"line {number:03d}\n" for number in range(60) if number not in lost) == found


def test_bad_records_reach_the_loader_from_the_settings(tmp_path, small_records):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*BAD_LINES.values(), b'{"text": "one two"}']))
    settings = DataSettings(corpus=str(tmp_path / "a.jsonl"), sequence_length=2, max_bad_records=99)
    corpus = open_corpus(settings)
    assert pack(corpus, ByteTokenizer(), 2, tmp_path).num_tokens == 8
    assert corpus.bad_records.count == len(BAD_LINES)
