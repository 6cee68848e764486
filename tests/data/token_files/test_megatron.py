"""Megatron's files against bytes that this file packs itself, and (slow) against megatron-core."""

import json
import logging
import os
import struct
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from environments import environment_with
from hypothesis import given
from hypothesis import strategies as st
from quick_cases import every_value
from safetensors.torch import load_file

from launchers import ROOT, metrics, run, training_text, write_config
from megalowbit.data.loader import build_loader
from megalowbit.data.packing import pack
from megalowbit.data.settings import DataSettings
from megalowbit.data.sources import open_corpus
from megalowbit.data.token_files import megatron
from megalowbit.data.token_files.megatron import MegatronCorpus, MegatronWriter
from megalowbit.data.tokenize import ByteTokenizer, NoTokenizer, build_tokenizer
from megalowbit.errors import UserError

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}  # struct's letters, not numpy's


def index_bytes(sizes, documents, *, code=8, version=1, magic=b"MMIDIDX\0\0", pointers=None, modes=b""):
    """An index as the format describes it, field by field."""
    width = struct.calcsize("<" + CODES.get(code, "q"))
    if pointers is None:
        pointers = [width * sum(sizes[:number]) for number in range(len(sizes))]
    parts = [magic, struct.pack("<Q", version), struct.pack("<B", code)]
    parts += [struct.pack("<Q", len(sizes)), struct.pack("<Q", len(documents))]
    parts += [struct.pack(f"<{len(sizes)}i", *sizes), struct.pack(f"<{len(pointers)}q", *pointers)]
    parts += [struct.pack(f"<{len(documents)}q", *documents), modes]
    return b"".join(parts)


def write_pair(prefix, ids, sizes, documents, *, code=8, **values):
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(ids)}{CODES.get(code, 'q')}", *ids))
    Path(f"{prefix}.idx").write_bytes(index_bytes(sizes, documents, code=code, **values))
    return prefix


def write(prefix, *documents, vocab_size=256):
    with MegatronWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_document(np.array(document, np.int64))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", ["text_document", "text_document.bin", "text_document.idx"])
def test_ids_and_documents_are_those_of_the_files(tmp_path, code, name):
    write_pair(tmp_path / "text_document", [5, 6, 7, 8, 9, 0], [2, 0, 1, 3], [0, 2, 2, 4], code=code)
    corpus = open_corpus(DataSettings(corpus=str(tmp_path / name), sequence_length=2))
    assert isinstance(corpus, MegatronCorpus)
    assert corpus.tokens.tolist() == [5, 6, 7, 8, 9, 0]
    documents = [corpus.document(number).tolist() for number in range(corpus.num_documents)]
    assert documents == [[5, 6], [], [7, 8, 9, 0]]
    assert corpus.index.modes is None


def test_modes_of_multimodal_data_are_read(tmp_path):
    write_pair(tmp_path / "a", [1, 2, 3], [1, 2], [0, 2], modes=b"\x00\x01")
    assert MegatronCorpus(tmp_path / "a").index.modes.tolist() == [0, 1]


@given(st.lists(st.lists(st.integers(0, 300), max_size=9), min_size=1, max_size=8), st.booleans())
def test_what_is_written_has_the_bytes_of_the_format(tmp_path_factory, documents, is_wide):
    prefix = tmp_path_factory.mktemp("pair") / "a"
    write(prefix, *documents, vocab_size=70_000 if is_wide else 301)
    code, flat = 4 if is_wide else 8, [each for document in documents for each in document]
    sizes = [len(document) for document in documents]
    assert Path(f"{prefix}.idx").read_bytes() == index_bytes(sizes, range(len(sizes) + 1), code=code)
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack(f"<{len(flat)}{CODES[code]}", *flat)
    if flat:
        corpus = MegatronCorpus(prefix)
        assert [corpus.document(number).tolist() for number in range(len(sizes))] == documents


def test_tables_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "ENTRIES_PER_WRITE", 3)
    sizes = [2, 0, 1, 4, 3, 1, 2]
    write(tmp_path / "a", *(list(range(size)) for size in sizes))
    assert (tmp_path / "a.idx").read_bytes() == index_bytes(sizes, range(8))


def damaged(**changes):
    """Bytes of an index of [2, 3] tokens with one field that is wrong."""
    return index_bytes(**{"sizes": [2, 3], "documents": [0, 1, 2], **changes})


GOOD = damaged()
DAMAGES = {
    "magic": (damaged(magic=b"MMIDIDY\0\0"), "is not an index of Megatron"),
    "empty": (b"", "is not an index of Megatron"),
    "header": (GOOD[:20], "is truncated: it has 20 bytes, fewer than its header"),
    "version": (damaged(version=2), "has version 2: write it as version 1"),
    "dtype": (GOOD[:17] + b"\x09" + GOOD[18:], "has dtype code 9, and only 1 … 8 exist"),
    "floats": (GOOD[:17] + b"\x07" + GOOD[18:], "says that ids are float32"),
    "tables": (GOOD[:-1], "is truncated: it has 81 bytes, and 2 sequences in 2 documents take 82"),
    "huge count": (GOOD[:18] + struct.pack("<Q", 2**63) + GOOD[26:], "is truncated"),
    "too long": (GOOD + b"\0", "has 83 bytes, and .* take 82, or 84 with modes"),
    "no sequence": (damaged(sizes=[], documents=[0]), "has no documents"),
    "first": (damaged(pointers=[2, 4]), "the first sequence begins at byte 2, not 0"),
    "pointer": (damaged(pointers=[0, 400]), "pointer 400 of sequence 1 is outside the .bin file of 10 bytes"),
    "negative": (damaged(pointers=[0, -4]), "pointer -4 of sequence 1 is outside"),
    "size": (damaged(sizes=[-2, 3], pointers=[0, 4]), "size -2 of sequence 0 is outside"),
    "gap": (damaged(pointers=[0, 6]), "sequence 1 begins at byte 6, not where the one before it ends"),
    "other bin": (damaged(sizes=[2, 2]), "has 10 bytes, and its index a.idx describes 8"),
    "documents end": (damaged(documents=[0, 1, 3]), "its documents are sequences 0 … 3, not 0 … 2"),
    "documents start": (damaged(documents=[1, 1, 2]), "its documents are sequences 1 … 2, not 0 … 2"),
    "documents order": (damaged(documents=[0, 2, 1, 2]), "document 2 begins at sequence 1, after sequence 2"),
    "documents far": (
        damaged(documents=[0, 9, 2]),
        "document 1 begins at sequence 9, after sequence 0, of 2",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_refused_with_the_field_that_is_wrong(tmp_path, damage):
    content, message = DAMAGES[damage]
    (tmp_path / "a.bin").write_bytes(bytes(10))
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        MegatronCorpus(tmp_path / "a")
    assert "\n" not in str(caught.value)
    (tmp_path / "a.idx").write_bytes(GOOD)
    assert MegatronCorpus(tmp_path / "a").num_documents == 2


@given(st.data())
def test_no_damage_of_single_bytes_escapes_as_another_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
    (folder / "a.bin").write_bytes(bytes(10))
    (folder / "a.idx").write_bytes(content[: data.draw(st.integers(0, len(GOOD)))])
    try:
        corpus = MegatronCorpus(folder / "a")
    except UserError:
        return
    assert sum(len(corpus.document(number)) for number in range(corpus.num_documents)) == len(corpus.tokens)


@pytest.mark.parametrize("left", [".bin", ".idx"])
def test_half_a_pair_is_refused_and_named(tmp_path, left):
    write(tmp_path / "a", [1, 2])
    missing = {".bin": ".idx", ".idx": ".bin"}[left]
    Path(f"{tmp_path / 'a'}{missing}").unlink()
    with pytest.raises(UserError, match=rf"a\{missing} is missing or not a regular file, and .*a\{left}"):
        open_corpus(DataSettings(corpus=str(tmp_path / "a"), sequence_length=2))


def test_tables_of_any_size_are_checked_in_a_bounded_number_of_blocks(monkeypatch):
    monkeypatch.setattr(megatron, "NUM_BLOCKS", 5)
    for count in range(1, 200):
        blocks = list(megatron.evenly_spaced(count, 4))
        seen = {entry for start, stop in blocks for entry in range(start, stop)}
        assert {0, count - 1} <= seen <= set(range(count))
        assert len(blocks) <= 5
        assert count > 20 or len(seen) == count


def write_zeros(prefix, num_documents, length):
    """Documents of equal length; the `.bin` file is sparse."""
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(num_documents * length * 2)
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, num_documents, num_documents + 1))
        np.full(num_documents, length, "<i4").tofile(file)
        np.arange(0, num_documents * length * 2, length * 2, "<i8").tofile(file)
        np.arange(num_documents + 1, dtype="<i8").tofile(file)


def memory_of_files():
    """Bytes of mapped files in memory."""
    return int(Path("/proc/self/status").read_text().split("RssFile:")[1].split()[0]) * 1024


def test_opening_takes_the_same_memory_for_any_size(tmp_path):
    grown, kept = [], []
    for name, num_documents in (("small", 20_000), ("large", 2_000_000)):
        write_zeros(tmp_path / name, num_documents, 1000)
        before = memory_of_files()
        kept.append(pack(MegatronCorpus(tmp_path / name), ByteTokenizer(), 2048, tmp_path))
        grown.append(memory_of_files() - before)
    assert grown[1] < 1.2 * grown[0] + 2 * 2**20, [each / 2**20 for each in grown]


def test_an_id_outside_the_vocabulary_is_named_with_document_and_position(tmp_path):
    write(tmp_path / "a", [1, 2, 3], [], [4, 5, 299, 7], vocab_size=300)
    corpus = MegatronCorpus(tmp_path / "a")
    with pytest.raises(UserError, match=r"token id 299 at position 2 of document 2 is outside .* 256 tokens"):
        pack(corpus, ByteTokenizer(), 2, tmp_path)
    assert pack(corpus, NoTokenizer(300), 2, tmp_path).num_samples == 3
    write_pair(tmp_path / "b", [1, 2, -3, 4], [4], [0, 1], code=4)
    with pytest.raises(UserError, match="token id -3 at position 2 of document 0"):
        pack(MegatronCorpus(tmp_path / "b"), NoTokenizer(300), 2, tmp_path)


def test_ids_between_the_checked_blocks_are_found_when_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "ID_BLOCK", 2)
    monkeypatch.setattr(megatron, "NUM_BLOCKS", 2)
    write(tmp_path / "a", [1] * 10, [2, 3, 290, 3, 2], [5] * 10, vocab_size=300)
    dataset = pack(MegatronCorpus(tmp_path / "a"), NoTokenizer(257), 4, tmp_path)
    assert dataset.batch(np.array([0, 1, 2])).tolist() == [[1] * 4, [1] * 4, [1, 1, 2, 3]]
    with pytest.raises(UserError, match="token id 290 at position 2 of document 1"):
        dataset.batch(np.array([1, 3]))


def test_documents_without_end_tokens_are_reported(tmp_path, caplog):
    write(tmp_path / "a", [1, 2], [3, 4])
    write(tmp_path / "b", [1, 2, 0], [3, 0])
    with caplog.at_level(logging.WARNING):
        pack(MegatronCorpus(tmp_path / "b"), ByteTokenizer(), 2, tmp_path)
        pack(MegatronCorpus(tmp_path / "a"), NoTokenizer(256), 2, tmp_path)
        assert not caplog.text
        pack(MegatronCorpus(tmp_path / "a"), ByteTokenizer(), 2, tmp_path)
    assert "ends with the end-of-document id 0" in caplog.text


def kept_apart(prefix, cache_dir):
    settings = DataSettings(
        corpus=str(prefix), sequence_length=4, packing="documents", cache_dir=cache_dir, seed=1
    )
    return build_loader(settings, micro_batch_size=1, rank=0, world_size=1)


@every_value(place=[0, 1, 1300, 2999], block=[7, 1, 2**14])
def test_no_document_without_an_end_is_kept_apart_from_the_next(tmp_path, monkeypatch, place, block):
    monkeypatch.setattr(megatron, "DOCUMENTS_AT_ONCE", block)
    documents = [[1, 2, 0], [], [3, 0]] * 1000
    prefix = tmp_path / "ids"
    write(prefix, *documents)
    kept_apart(prefix, tmp_path / "cache")
    documents[place] = [5, 6]
    write(prefix, *documents)
    with pytest.raises(UserError, match=f"ids: document {place} does not end with the end-of-document id 0"):
        kept_apart(prefix, tmp_path / "cache")


def test_documents_of_several_sequences_end_where_the_last_of_them_does(tmp_path):
    ids, sizes, documents = [1, 0, 2, 0, 3, 4, 0], [2, 0, 1, 1, 2, 1, 0], [0, 2, 4, 4, 7]
    kept_apart(write_pair(tmp_path / "a", ids, sizes, documents, code=4), tmp_path)
    with pytest.raises(UserError, match="document 1 does not end with"):
        kept_apart(write_pair(tmp_path / "b", ids, sizes, [0, 2, 3, 7], code=4), tmp_path)


def test_all_documents_are_looked_at_once_for_each_state_of_the_files(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(megatron, "is_settled", lambda _: True)
    write(tmp_path / "ids", [1, 0], [2, 0], [3, 0])
    caplog.set_level(logging.INFO)

    def looks(cache_dir):
        caplog.clear()
        kept_apart(tmp_path / "ids", cache_dir)
        return caplog.text.count("looking at the ends of all 3 documents")

    cache = tmp_path / "cache"
    assert [looks(cache), looks(cache), looks(tmp_path / "other")] == [1, 0, 1]
    (note,) = cache.glob("digests/*.ends.txt")
    note.write_bytes(b"\xff")
    assert [looks(cache), looks(cache)] == [1, 0]
    with monkeypatch.context() as patch:  # another mount
        patch.setattr(megatron, "file_facts", lambda file: [file.stat().st_size, 7, 0, 0])
        assert [looks(cache), looks(cache)] == [1, 0]
    assert looks(cache) == 0
    write(tmp_path / "ids", [1, 0], [2, 0], [0])  # other files
    assert looks(cache) == 1
    write(tmp_path / "ids", [1, 0], [2, 9], [3, 0])
    for _ in range(2):
        with pytest.raises(UserError, match="document 1 does not end"):
            looks(cache)


def test_files_that_may_still_change_within_their_times_are_looked_at_again(tmp_path):
    write(tmp_path / "ids", [1, 0], [2, 0])
    kept_apart(tmp_path / "ids", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("digests/*.ends.txt"))


@pytest.mark.parametrize("problem", ["cache", "future"])
def test_a_sample_of_documents_is_looked_at_if_nothing_can_be_noted(tmp_path, monkeypatch, caplog, problem):
    monkeypatch.setattr(megatron, "TABLE_BLOCK", 2)
    monkeypatch.setattr(megatron, "NUM_BLOCKS", 3)
    prefix, cache = tmp_path / "ids", tmp_path / "cache"
    if problem == "cache":
        monkeypatch.setattr(megatron, "is_settled", lambda _: True)
        cache.write_text("no folder")
    for place, is_seen in ((10, True), (3, False)):
        write(prefix, *([1, 9 if number == place else 0] for number in range(20)))
        if problem == "future":
            os.utime(tmp_path / "ids.bin", (4e9, 4e9))
        with pytest.raises(UserError, match="document 10 ") if is_seen else nullcontext():
            MegatronCorpus(prefix, cache_dir=cache).check_tokens(256, 0, needs_ends=True)
    assert caplog.text.count("starts look at the ends of 6 of 20 documents") == 2


def test_files_that_vanish_while_ends_are_looked_at_are_named(tmp_path):
    write(tmp_path / "ids", [1, 0])
    corpus = MegatronCorpus(tmp_path / "ids")
    corpus.idx.unlink()
    with pytest.raises(UserError, match=r"ids\.idx cannot be read \(No such file"):
        corpus.check_tokens(256, 0, needs_ends=True)


def test_a_damaged_index_between_the_checked_blocks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "TABLE_BLOCK", 2)
    monkeypatch.setattr(megatron, "NUM_BLOCKS", 2)
    ids, sizes = [1, 0] * 20, [2] * 20
    for wrong in (-3, 2, 99):
        documents = [*range(10), wrong, *range(11, 21)]
        corpus = MegatronCorpus(write_pair(tmp_path / "ids", ids, sizes, documents))
        with pytest.raises(UserError, match=f"document 10 begins at sequence {wrong}, which is outside"):
            corpus.check_tokens(256, 0, needs_ends=True)


def test_looking_at_all_documents_takes_the_same_memory_for_any_number(tmp_path):
    grown = []
    for name, num_documents in (("small", 2**14), ("large", 40 * 2**14)):
        write_zeros(tmp_path / name, num_documents, 100)
        corpus = MegatronCorpus(tmp_path / name)
        before = memory_of_files()
        corpus.check_tokens(256, 0, needs_ends=True)
        grown.append(memory_of_files() - before)
    assert grown[1] < 1.2 * grown[0] + 2 * 2**20, [each / 2**20 for each in grown]


def test_token_ids_cannot_be_tokenised_nor_text_without_a_tokenizer(tmp_path):
    write(tmp_path / "a", [1, 2])
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"consists of token ids, not text: set data\.tokenizer"):
        build_tokenizer(
            DataSettings(corpus=str(tmp_path / "a"), sequence_length=2, tokenizer="bpe", vocab_size=300)
        )
    settings = DataSettings(
        corpus=str(tmp_path / "a.txt"),
        sequence_length=2,
        tokenizer="none",
        vocab_size=300,
        cache_dir=tmp_path,
    )
    with pytest.raises(UserError, match=r'tokenizer "none" is for corpora of token ids, and .* is text'):
        build_loader(settings, micro_batch_size=1, rank=0, world_size=1)


def test_the_loader_reads_every_sample_of_the_files_once(tmp_path):
    ids = list(np.random.default_rng(0).integers(1, 256, 64))
    write(tmp_path / "a", ids[:10], ids[10:11], ids[11:])
    settings = DataSettings(corpus=str(tmp_path / "a"), sequence_length=4, seed=3)
    loader = build_loader(settings, micro_batch_size=4, rank=0, world_size=1)
    rows = [row for _ in range(4) for row in next(loader)["input_ids"].tolist()]
    assert sorted(rows) == sorted(np.array(ids).reshape(16, 4).tolist())
    assert not list(tmp_path.glob("**/*.npy"))  # nothing is copied


def test_a_writer_that_fails_leaves_the_old_files(tmp_path):
    write(tmp_path / "a", [1, 2])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="ids must be 0 … 255, not 3 … 256"):
        write(tmp_path / "a", [7], [3, 256])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write(tmp_path / "a", [3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    with pytest.raises(UserError, match=r"none/a\.bin cannot be written \(No such file"):
        write(tmp_path / "none" / "a", [1])


def test_the_fingerprint_follows_the_content_of_both_files(tmp_path):
    for name, documents in {
        "a": ([1, 2], [3]),
        "b": ([1, 2], [3]),
        "c": ([1], [2, 3]),
        "d": ([1, 2], [4]),
    }.items():
        write(tmp_path / name, *documents)
    a, b, c, d = (MegatronCorpus(tmp_path / name).fingerprint for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


MEGATRON_CORE = "megatron-core==0.16.1"
MEGATRON = """
    import json, sys, torch
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    def read(prefix):
        data = IndexedDataset(prefix)
        ends = data.document_indices
        return data.index.dtype.__name__, [
            [data[number].tolist() for number in range(start, end)] for start, end in zip(ends, ends[1:])
        ]

    def write(prefix, dtype, documents):
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(np, dtype))
        for document in documents:
            for sequence in document:
                builder.add_item(torch.tensor(sequence))
            builder.end_document()
        builder.finalize(prefix + ".idx")

    to_read, dtypes, documents = map(json.loads, sys.argv[1:])
    for dtype in dtypes:
        write("theirs_" + dtype, dtype, documents)
    lines = open("lines.txt", "rb").readlines()
    write("theirs_text", "uint16", [[[*line, 0]] for line in lines])
    print(json.dumps([read(prefix) for prefix in to_read]))
"""
VOCABULARIES = [50_257, 128_256]
WIDTHS = ["uint16", "int32", "int64"]
SEQUENCES = [[[1, 2, 3], [4, 0]], [[5, 0]], [[6, 7, 8, 9, 255, 0]]]  # of three documents


def documents_of(vocab_size):
    return [[1, 2, vocab_size - 1], [], [7], list(range(1000))]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """A folder where megatron-core has written files, and what it has read in those that are written here.

    Only the process in this folder sees megatron-core. There is one process, because it starts slowly.
    """
    folder = tmp_path_factory.mktemp("megatron")
    python = environment_with(folder, MEGATRON_CORE, "--no-deps") / "bin" / "python"
    for vocab_size in VOCABULARIES:
        write(folder / f"ours_{vocab_size}", *documents_of(vocab_size), vocab_size=vocab_size)
    (folder / "lines.txt").write_text(training_text())
    rows = [json.dumps({"text": line}) + "\n" for line in training_text().splitlines(keepends=True)]
    (folder / "lines.jsonl").write_text("".join(rows))
    tool = [sys.executable, ROOT / "tools" / "preprocess_data.py", "--append-eod", "--tokenizer", "byte"]
    files = ["--input", folder / "lines.jsonl", "--output-prefix", folder / "tool"]
    subprocess.run([*tool, *files], check=True, timeout=300)
    (folder / "program.py").write_text(textwrap.dedent(MEGATRON))
    to_read = [*(f"ours_{vocab_size}" for vocab_size in VOCABULARIES), "tool_text_document"]
    found = subprocess.run(
        [python, "program.py", *map(json.dumps, (to_read, WIDTHS, SEQUENCES))],
        capture_output=True, text=True, timeout=300, cwd=folder,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return folder, dict(zip([*VOCABULARIES, "tool"], json.loads(found.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_megatron_core_reads_what_is_written_here(exchanged, vocab_size):
    dtype, found = exchanged[1][vocab_size]
    assert dtype == ("uint16" if vocab_size < 2**16 else "int32")
    assert found == [[document] for document in documents_of(vocab_size)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WIDTHS)
def test_what_megatron_core_writes_is_read_here(exchanged, dtype):
    corpus = MegatronCorpus(exchanged[0] / f"theirs_{dtype}")
    assert corpus.index.dtype.name == dtype
    expected = [[each for sequence in document for each in sequence] for document in SEQUENCES]
    assert [corpus.document(number).tolist() for number in range(corpus.num_documents)] == expected
    settings = DataSettings(corpus=str(corpus.prefix), sequence_length=4)
    loader = build_loader(settings, micro_batch_size=3, rank=0, world_size=1)
    flat = [each for document in expected for each in document][:12]
    assert sorted(next(loader)["input_ids"].tolist()) == sorted(np.array(flat).reshape(3, 4).tolist())


@pytest.mark.slow
def test_megatron_core_reads_what_the_tool_writes(exchanged):
    dtype, found = exchanged[1]["tool"]
    assert dtype == "uint16"
    assert found == [[[*line.encode(), 0]] for line in training_text().splitlines(keepends=True)]


@pytest.mark.slow
def test_what_megatron_core_writes_trains_like_the_text(exchanged, tmp_path):
    """The same losses and weights as on the text itself, tokenised here."""
    found = {}
    for name, corpus in (("text", "lines.jsonl"), ("ids", "theirs_text")):
        (tmp_path / name).mkdir()
        data = {"corpus": str(exchanged[0] / corpus), "tokenizer": "byte", "sequence_length": 32}
        config = write_config(tmp_path / name, block={"data": data})
        done = run("python", "--ds-config", config, "--run-dir", tmp_path / name / "run", cwd=tmp_path / name)
        assert done.code == 0, done.output
        rows = metrics(tmp_path / name / "run")
        weights = load_file(tmp_path / name / "run" / "hf" / "model.safetensors")
        found[name] = [(row["loss"], row["grad_norm"]) for row in rows], weights
    (losses, weights), (losses_of_ids, weights_of_ids) = found.values()
    assert losses == losses_of_ids
    assert len(losses) == 6
    assert weights.keys() == weights_of_ids.keys()
    assert all(weight.equal(weights_of_ids[name]) for name, weight in weights.items())
