import errno
import json
import logging
import os
import signal
import textwrap
import threading
import time

import pytest
from forks import run_processes

from megalowbit.data import cache
from megalowbit.data.cache import cached_file, content_digest, run_on_each_node_first
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


def break_manifest(path):
    path.with_name("file.manifest.json").write_text("{")


def lie_in_manifest(path):
    path.with_name("file.manifest.json").write_text("[]")


@pytest.mark.parametrize("damage", [flip, cut, lose_manifest, break_manifest, lie_in_manifest])
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
