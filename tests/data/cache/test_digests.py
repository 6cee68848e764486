"""Digests of files against `hashlib`; what is read for them, and what is remembered."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalowbit.data.cache import digests as module
from megalowbit.data.cache.digests import content_digest, corpus_digests, digest_of, key_of


def test_the_digest_sees_every_byte_of_a_file_up_to_64_mib(tmp_path):
    path = tmp_path / "file"
    content = bytearray(os.urandom(3 * module.BLOCK_BYTES + 5))
    digests = set()
    for position in (None, 0, module.BLOCK_BYTES - 1, module.BLOCK_BYTES, len(content) - 1):
        if position is not None:
            content[position] ^= 0x80
        path.write_bytes(content)
        digests.add(content_digest(path))
    path.write_bytes(content[:-1])
    digests.add(content_digest(path))
    assert len(digests) == 6


def test_the_digest_of_a_large_file_reads_its_ends_and_its_size(tmp_path):
    path = tmp_path / "file"
    size = 70 * 2**20
    digests = set()
    for position, length in ((0, size), (size - 1, size), (0, size + 1)):
        with path.open("wb") as file:  # sparse: takes no room
            file.truncate(length)
            file.seek(position)
            file.write(b"x")
        digests.add(content_digest(path))
    assert len(digests) == 3


def bytes_read_by(work):
    """What a call returns, and how much this process has read meanwhile."""

    def count():
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before = count()
    own = count() - before  # the file above
    before = count()
    return work(), count() - before - own


@pytest.fixture
def settled(monkeypatch):
    """Lets new files be remembered at once."""
    monkeypatch.setattr(module, "NS_UNTIL_SETTLED", 0)


def test_keys_name_the_same_values_in_every_version():
    """Cached files and checkpoints are found by them; computed with sha256sum."""
    expected = "06d8949c738d66d0ba58a20471beb4850e7d102027540c8abdf64a098375f3de"
    assert digest_of((1, "a", None)) == expected
    assert key_of((1, "a", None)) == expected[:32]


def write_files(folder, count, size):
    folder.mkdir()
    files = [folder / f"{number:04}" for number in range(count)]
    for number, file in enumerate(files):
        file.write_bytes(number.to_bytes(2, "big") * (size // 2))
    return files


def test_digests_of_a_small_corpus_are_of_its_whole_files(tmp_path):
    files = write_files(tmp_path / "a", 5, module.BLOCK_BYTES * 3)
    expected = [
        hashlib.sha256(str(file.stat().st_size).encode() + file.read_bytes()).hexdigest() for file in files
    ]
    assert corpus_digests(files) == expected == [content_digest(file) for file in files]


def test_a_thousand_files_are_read_within_one_budget_and_then_not_at_all(tmp_path, monkeypatch, settled):
    monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(module, "TOTAL_BLOCKS", 500)
    files = write_files(tmp_path / "a", 1000, 8192)
    digests, first = bytes_read_by(lambda: corpus_digests(files, tmp_path))
    assert len(set(digests)) == 1000
    assert 1_900_000 < first <= 500 * 4096
    again, second = bytes_read_by(lambda: corpus_digests(files, tmp_path))
    assert again == digests
    assert second < 250_000  # what is remembered
    record = next((tmp_path / "digests").iterdir())
    record.unlink()
    assert corpus_digests(files, tmp_path) == digests


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=3000))
@example([2**26] * 3000)
def test_at_most_a_gib_of_any_files_is_read_and_their_ends_always(sizes):
    blocks, block = module._blocks_of(sizes)
    assert sum(min(size, blocks * block) for size in sizes) <= 2**30
    assert blocks >= 4
    assert block >= 2
    if sum(min(size + 2**18, 2**26) for size in sizes) < 2**30:  # as before there was a common limit
        assert (blocks, block) == (256, 2**18)


def edit(path, position, *, time_ns=None):
    """Change a byte in place."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"x")
    if time_ns is not None:
        os.utime(path, ns=(time_ns, time_ns))


def test_content_decides_about_the_digest_and_times_only_about_reading(tmp_path, settled):
    (file,) = write_files(tmp_path / "a", 1, 1000)
    (digest,) = corpus_digests([file], tmp_path)
    os.utime(file, ns=(5, 5))
    assert corpus_digests([file], tmp_path) == [digest]
    copy = tmp_path / "copy"
    copy.write_bytes(file.read_bytes())
    assert corpus_digests([copy], tmp_path) == [digest]
    edit(file, 500, time_ns=5)  # as a program does that restores the time
    (edited,) = corpus_digests([file], tmp_path)
    assert edited == content_digest(file) != digest
    file.unlink()
    copy.replace(file)
    assert corpus_digests([file], tmp_path) == [digest]


def test_a_new_time_without_new_content_is_reported_if_not_all_is_read(tmp_path, settled, caplog):
    large, small = tmp_path / "large", tmp_path / "small"
    for path, size in ((large, 70 * 2**20), (small, 2**20)):
        with path.open("wb") as file:
            file.truncate(size)
        first = corpus_digests([path], tmp_path)
        assert corpus_digests([path], tmp_path) == first
        assert not caplog.text
        os.utime(path, ns=(5, 5))
        assert corpus_digests([path], tmp_path) == first
        is_said = f"{path} has a new time, but its size and the 256 blocks" in caplog.text
        assert is_said == (path == large)
        caplog.clear()
        assert corpus_digests([path], tmp_path) == first
        assert not caplog.text
    edit(large, 0)
    assert corpus_digests([large], tmp_path) != first
    assert not caplog.text


def test_copies_of_one_name_on_several_nodes_do_not_look_edited(tmp_path, settled, caplog):
    """A folder renamed to and fro stands for the disks of two nodes, which share the cache."""
    nodes, corpus = (tmp_path / "first", tmp_path / "second"), tmp_path / "corpus"
    for number, node in enumerate(nodes):
        node.mkdir()
        with (node / "a.txt").open("wb") as file:
            file.truncate(70 * 2**20)
        os.utime(node / "a.txt", ns=(number, number))
    found = set()
    for node in nodes * 2:
        node.rename(corpus)
        found |= set(corpus_digests([corpus / "a.txt"], tmp_path))
        corpus.rename(node)
    assert len(found) == 1
    assert not caplog.text


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path):
    (file,) = write_files(tmp_path / "a", 1, 1000)
    (digest,) = corpus_digests([file], tmp_path)
    assert not (tmp_path / "digests").exists()
    edit(file, 3)  # perhaps within the same tick of the file system's clock
    assert corpus_digests([file], tmp_path) != [digest]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: "{}",
        lambda text: text.replace("a", "b"),
        lambda text: "\0" * 50,
    ],
)
def test_what_is_remembered_may_be_damaged(tmp_path, settled, damage):
    (file,) = write_files(tmp_path / "a", 1, 1000)
    digests = corpus_digests([file], tmp_path)
    (record,) = (tmp_path / "digests").iterdir()
    whole = record.read_text()
    record.write_text(damage(whole))
    assert corpus_digests([file], tmp_path) == digests
    assert record.read_text() == whole


def test_what_is_remembered_may_be_impossible_to_write(tmp_path, settled):
    (file,) = write_files(tmp_path / "a", 1, 1000)
    (tmp_path / "digests").write_text("a file")
    assert corpus_digests([file], tmp_path) == [content_digest(file)]
