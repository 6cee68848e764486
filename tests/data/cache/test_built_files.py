"""Cached files that are built, damaged, copied, and continued after a failed build."""

import errno
import json
import logging
import os
import shutil
import sys

import pytest
from builders import Builder

from megalowbit.data.cache import built_files
from megalowbit.data.cache.built_files import cached_file
from megalowbit.data.cache.digests import content_digest
from megalowbit.errors import UserError


def test_a_file_is_built_once_and_then_reused(tmp_path):
    build = Builder()
    path = tmp_path / "deep" / "file"
    for _ in range(3):
        assert cached_file(path, build).read_bytes() == build.content
    assert build.calls == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["file", "file.manifest.json"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def lose_manifest(path):
    path.with_name("file.manifest.json").unlink()


def spoil_facts(path):
    manifest = path.with_name("file.manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "bad_records": "x"}))


def break_manifest(path):
    path.with_name("file.manifest.json").write_text("{")


def lie_in_manifest(path):
    path.with_name("file.manifest.json").write_text("[]")


@pytest.mark.parametrize("damage", [flip, cut, lose_manifest, break_manifest, lie_in_manifest, spoil_facts])
def test_a_damaged_file_is_built_again_with_a_line_in_the_log(tmp_path, caplog, damage):
    build = Builder()
    path = cached_file(tmp_path / "file", build)
    damage(path)
    with caplog.at_level(logging.WARNING):
        assert cached_file(path, build).read_bytes() == build.content
    assert build.calls == 2
    assert "damaged" in caplog.text
    assert str(path) in caplog.text
    cached_file(path, build)
    assert build.calls == 2


def build_large(path):
    with path.open("wb") as file:
        file.truncate(built_files.NUM_BLOCKS * built_files.BLOCK_BYTES + 50_000_000)


def overwrite_between_blocks(path):
    with path.open("r+b") as file:
        file.seek(built_files.BLOCK_BYTES + 1000)  # blocks begin every 458,222 bytes
        file.write(b"x" * 20_000)


def test_damage_of_a_large_file_between_the_blocks_is_found(tmp_path, caplog):
    path = cached_file(tmp_path / "file", build_large)
    sampled = content_digest(path)
    overwrite_between_blocks(path)
    assert content_digest(path) == sampled
    cached_file(path, build_large)
    assert "damaged" in caplog.text
    assert not any(path.read_bytes())


@pytest.fixture
def blocks_read(monkeypatch):
    """The numbers of blocks of which digests are taken."""
    read, digest = [], content_digest

    def note(path, blocks=built_files.NUM_BLOCKS):
        read.append(blocks)
        return digest(path, blocks)

    monkeypatch.setattr(built_files, "content_digest", note)
    return read


def test_a_large_file_is_read_completely_once_after_its_time_has_changed(tmp_path, caplog, blocks_read):
    path = cached_file(tmp_path / "file", build_large)
    blocks_read.clear()
    cached_file(path, build_large)
    os.utime(path, (1e9, 1e9))
    for _ in range(2):
        cached_file(path, lambda _: pytest.fail("it is whole"))
    assert blocks_read == [256, 256, sys.maxsize, 256]
    assert built_files.facts_of(path) == {}
    assert "damaged" not in caplog.text


def test_a_copy_that_keeps_the_time_is_not_read_completely(tmp_path, blocks_read):
    path = cached_file(tmp_path / "file", build_large)
    copy = tmp_path / "copies" / "file"
    copy.parent.mkdir()
    for name in (path.name, f"{path.name}.manifest.json"):
        shutil.copy2(tmp_path / name, copy.parent / name)
    blocks_read.clear()
    cached_file(copy, lambda _: pytest.fail("it is whole"))
    assert blocks_read == [256]


def test_a_sample_is_trusted_with_a_warning_if_the_manifest_cannot_be_written(
    tmp_path, monkeypatch, caplog, blocks_read
):
    path = cached_file(tmp_path / "file", build_large)
    os.utime(path, (1e9, 1e9))

    def refuse(_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(built_files, "atomic_file", refuse)
    blocks_read.clear()
    cached_file(path, lambda _: pytest.fail("it is whole"))
    assert blocks_read == [256]
    assert "starts compare only a sample of it" in caplog.text
    assert "Read-only file system" in caplog.text


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    def build(path):
        path.write_bytes(b"half")
        raise UserError("the corpus ends in the middle")

    with pytest.raises(UserError, match="the corpus ends"):
        cached_file(tmp_path / "file", build)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_with_a_journal_is_kept_for_the_next_build(tmp_path):
    def fail(draft):
        draft.write_bytes(b"half")
        built_files.journal_of(draft).write_text("{}")
        raise UserError("a record is bad")

    with pytest.raises(UserError, match="a record is bad"):
        cached_file(tmp_path / "file", fail)

    def go_on(draft):
        draft.write_bytes(draft.read_bytes() + b" and whole")
        return {"documents": 3}

    path = cached_file(tmp_path / "file", go_on)
    assert path.read_bytes() == b"half and whole"
    assert built_files.facts_of(path) == {"documents": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "file.manifest.json"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"cache folder .*taken cannot be written .*MEGALOWBIT_CACHE"):
        cached_file(tmp_path / "taken" / "file", Builder())


@pytest.mark.parametrize("has_manifest", [False, True])
def test_a_folder_in_place_of_a_file_is_named(tmp_path, has_manifest):
    path = cached_file(tmp_path / "file", Builder())
    path.unlink()
    path.mkdir()
    if not has_manifest:
        lose_manifest(path)
    with pytest.raises(UserError, match=r"file in the cache is a folder and should be a file: remove it"):
        cached_file(path, Builder())


def test_a_name_that_is_no_valid_path_is_a_one_line_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot be written \(File name too long\)"):
        cached_file(tmp_path / ("x" * 300) / "file", Builder())


def test_the_manifest_is_plain_json(tmp_path):
    path = cached_file(tmp_path / "file", Builder(b"12345"))
    facts = json.loads((tmp_path / "file.manifest.json").read_text())
    assert facts == {"size": 5, "digest": content_digest(path)}
