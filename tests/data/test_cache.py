import errno
import hashlib
import json
import logging
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from forks import run_processes
from hypothesis import given
from hypothesis import strategies as st

from megalowbit.data import cache
from megalowbit.data.cache import cached_file, content_digest, corpus_digests, run_on_each_node_first
from megalowbit.errors import TransientError, UserError

TIMEOUT = 90


class Builder:
    def __init__(self, content=b"tokens" * 100):
        self.content = content
        self.calls = 0

    def __call__(self, path):
        self.calls += 1
        path.write_bytes(self.content)


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
        file.truncate(cache.NUM_BLOCKS * cache.BLOCK_BYTES + 50_000_000)


def overwrite_between_blocks(path):
    with path.open("r+b") as file:
        file.seek(cache.BLOCK_BYTES + 1000)  # blocks begin every 458,222 bytes
        file.write(b"x" * 20_000)


def test_damage_of_a_large_file_between_the_blocks_is_found(tmp_path, caplog):
    path = cached_file(tmp_path / "file", build_large)
    sampled = content_digest(path)
    overwrite_between_blocks(path)
    assert content_digest(path) == sampled
    cached_file(path, build_large)
    assert "damaged" in caplog.text
    assert not any(path.read_bytes())


def test_a_large_file_is_read_completely_once_after_it_was_copied(tmp_path, monkeypatch, caplog):
    path = cached_file(tmp_path / "file", build_large)
    read, digest = [], content_digest

    def note(path, blocks=cache.NUM_BLOCKS):
        read.append(blocks)
        return digest(path, blocks)

    monkeypatch.setattr(cache, "content_digest", note)
    cached_file(path, build_large)
    os.utime(path, (1e9, 1e9))
    for _ in range(2):
        cached_file(path, lambda _: pytest.fail("it is whole"))
    assert read == [256, 256, sys.maxsize, 256]
    assert cache.facts_of(path) == {}
    assert "damaged" not in caplog.text


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    def build(path):
        path.write_bytes(b"half")
        raise UserError("the corpus ends in the middle")

    with pytest.raises(UserError, match="the corpus ends"):
        cached_file(tmp_path / "file", build)
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_builds_and_the_others_wait(tmp_path):
    build, seen = Builder(os.urandom(1 << 20)), []

    def slowly(path):
        time.sleep(0.3)
        build(path)

    def use():
        seen.append(cached_file(tmp_path / "file", slowly).read_bytes())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert seen == [build.content] * 4
    assert build.calls == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "file.manifest.json"]


def test_without_file_locks_builds_at_the_same_time_do_not_disturb_each_other(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    barrier = threading.Barrier(4)
    content = os.urandom(1 << 20)
    seen = []

    def build(path):
        barrier.wait(TIMEOUT)  # all have found nothing, and now all write
        path.write_bytes(content)

    def use():
        seen.append(cached_file(tmp_path / "file", build).read_bytes())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert seen == [content] * 4
    assert "has no file locks" in caplog.text
    assert {p.name for p in tmp_path.iterdir()} == {"file", "file.manifest.json", ".file.lock"}


def test_waiting_ends_with_a_line_that_names_the_builder(tmp_path):
    is_building, may_end = threading.Event(), threading.Event()

    def build(path):
        is_building.set()
        may_end.wait(TIMEOUT)
        path.write_bytes(b"tokens")

    builder = threading.Thread(target=cached_file, args=(tmp_path / "file", build))
    builder.start()
    assert is_building.wait(TIMEOUT)
    message = rf"file is still being built by process {os.getpid()} on .* after 0\.2 s"
    with pytest.raises(TransientError, match=message):
        cached_file(tmp_path / "file", Builder(), timeout=0.2)
    may_end.set()
    builder.join(TIMEOUT)
    assert cached_file(tmp_path / "file", Builder(), timeout=0.2).read_bytes() == b"tokens"


def test_who_waits_for_a_killed_builder_takes_its_place(tmp_path):
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:  # builds until it is killed
        cached_file(tmp_path / "file", lambda path: (os.write(go, b"x"), time.sleep(TIMEOUT)))
        os._exit(0)
    os.read(ready, 1)
    build, seen = Builder(), []
    waiting = threading.Thread(target=lambda: seen.append(cached_file(tmp_path / "file", build)))
    waiting.start()
    time.sleep(0.2)
    assert not build.calls
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    waiting.join(TIMEOUT)
    assert seen
    assert build.calls == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "file.manifest.json"]


def test_a_draft_with_a_journal_is_kept_for_the_next_build(tmp_path):
    def fail(draft):
        draft.write_bytes(b"half")
        cache.journal_of(draft).write_text("{}")
        raise UserError("a record is bad")

    with pytest.raises(UserError, match="a record is bad"):
        cached_file(tmp_path / "file", fail)

    def go_on(draft):
        draft.write_bytes(draft.read_bytes() + b" and whole")
        return {"documents": 3}

    path = cached_file(tmp_path / "file", go_on)
    assert path.read_bytes() == b"half and whole"
    assert cache.facts_of(path) == {"documents": 3}
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


def test_the_digest_sees_every_byte_of_a_file_up_to_64_mib(tmp_path):
    path = tmp_path / "file"
    content = bytearray(os.urandom(3 * cache.BLOCK_BYTES + 5))
    digests = set()
    for position in (None, 0, cache.BLOCK_BYTES - 1, cache.BLOCK_BYTES, len(content) - 1):
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
    monkeypatch.setattr(cache, "NS_UNTIL_SETTLED", 0)


def write_files(folder, count, size):
    folder.mkdir()
    files = [folder / f"{number:04}" for number in range(count)]
    for number, file in enumerate(files):
        file.write_bytes(number.to_bytes(2, "big") * (size // 2))
    return files


def test_digests_of_a_small_corpus_are_of_its_whole_files(tmp_path):
    files = write_files(tmp_path / "a", 5, cache.BLOCK_BYTES * 3)
    expected = [
        hashlib.sha256(str(file.stat().st_size).encode() + file.read_bytes()).hexdigest() for file in files
    ]
    assert corpus_digests(files) == expected == [content_digest(file) for file in files]


def test_a_thousand_files_are_read_within_one_budget_and_then_not_at_all(tmp_path, monkeypatch, settled):
    monkeypatch.setattr(cache, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(cache, "TOTAL_BLOCKS", 500)
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
def test_at_most_a_gib_of_any_files_is_read_and_their_ends_always(sizes):
    blocks, block = cache._blocks_of(sizes)
    assert sum(min(size, blocks * block) for size in sizes) <= 2**30
    assert blocks >= 2 <= block
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


def test_a_single_process_just_runs_the_work():
    assert run_on_each_node_first(lambda: 7, str) == 7


# what each of two processes runs; a line of output for each scenario
PROCESS = """
    import os, sys, datetime
    from pathlib import Path
    import torch.distributed as dist
    from megalowbit.data.cache import run_on_each_node_first
    from megalowbit.errors import TransientError, UserError

    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=200))

    def work(scenario):
        if scenario == "order":
            if rank == 0:
                (folder / "made").touch()
            return (folder / "made").exists()
        if scenario == f"user_error_on_{rank}":
            raise UserError("no such corpus")
        if scenario == "transient" and rank == 1:
            raise TransientError("still being built")
        if scenario == "defect" and rank == 0:
            raise KeyError("a bug")
        return rank if scenario == "difference" else 1

    for scenario in sys.argv[2:]:
        try:
            print("result", run_on_each_node_first(lambda: work(scenario), str))
        except Exception as error:
            print(type(error).__name__, error)
    dist.destroy_process_group()
"""
SCENARIOS = {
    "order": ["result True", "result True"],
    "user_error_on_0": ["UserError no such corpus"] * 2,
    "user_error_on_1": ["UserError no such corpus"] * 2,
    "transient": ["TransientError still being built"] * 2,
    "defect": ["KeyError 'a bug'", "RuntimeError rank 0 failed: KeyError('a bug')"],
    "difference": ["UserError rank 1 reads other data than rank 0 (1 instead of 0)"] * 2,
}


@pytest.fixture(scope="module")
def lines_of_two_processes(tmp_path_factory):
    """What each of two processes printed, by scenario."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "program.py").write_text(textwrap.dedent(PROCESS))
    codes, outputs = run_processes(folder / "program.py", folder, *SCENARIOS, folder=folder)
    assert codes == [0, 0], outputs
    return dict(zip(SCENARIOS, zip(*map(str.splitlines, outputs), strict=True), strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_build_in_turn_and_fail_together(lines_of_two_processes, scenario):
    for line, expected in zip(lines_of_two_processes[scenario], SCENARIOS[scenario], strict=True):
        assert line.startswith(expected)


def test_the_manifest_is_plain_json(tmp_path):
    path = cached_file(tmp_path / "file", Builder(b"12345"))
    facts = json.loads((tmp_path / "file.manifest.json").read_text())
    assert facts == {"size": 5, "digest": content_digest(path)}
