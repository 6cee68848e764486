"""Builds of one file at the same time: one works, and the others wait, take its place, or give up."""

import errno
import fcntl
import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from builders import Builder

from megalowbit.data.cache import build_lock
from megalowbit.data.cache.built_files import cached_file
from megalowbit.errors import TransientError

TIMEOUT = 90


def in_threads(count, work):
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)


def test_one_of_several_builds_and_the_others_wait(tmp_path):
    build, seen = Builder(os.urandom(1 << 20)), []

    def slowly(path):
        time.sleep(0.3)
        build(path)

    def use():
        seen.append(cached_file(tmp_path / "file", slowly).read_bytes())

    in_threads(4, use)
    assert seen == [build.content] * 4
    assert build.calls == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "file.manifest.json"]


def test_without_file_locks_builds_at_the_same_time_do_not_disturb_each_other(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    barrier = threading.Barrier(4)
    content = os.urandom(1 << 20)
    seen = []

    def build(path):
        barrier.wait(TIMEOUT)  # all have found nothing, and now all write
        path.write_bytes(content)

    def use():
        seen.append(cached_file(tmp_path / "file", build).read_bytes())

    in_threads(4, use)
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


# Locks belong to open files, not to processes, so one process can play several in a fixed order.


def test_who_locks_a_file_that_has_lost_its_name_does_not_build(tmp_path, monkeypatch):
    path, second, flock = tmp_path / "file", Builder(), fcntl.flock
    with ExitStack() as first, ExitStack() as third:
        assert first.enter_context(build_lock.build_lock(path, timeout=0))

        def flock_late(file, operation):
            """The second has opened the lock's file; the first ends, and a third begins to build."""
            monkeypatch.setattr(fcntl, "flock", flock)
            first.close()
            assert third.enter_context(build_lock.build_lock(path, timeout=0))
            flock(file, operation)  # no other process has this file

        monkeypatch.setattr(fcntl, "flock", flock_late)
        with pytest.raises(TransientError, match="is still being built"):
            cached_file(path, second, timeout=0)
        assert not second.calls
    cached_file(path, second, timeout=0)
    assert second.calls == 1


def test_the_lock_is_held_until_its_file_has_lost_its_name(tmp_path, monkeypatch):
    path, unlink, builders = tmp_path / "file", Path.unlink, []

    def begin(number):
        try:
            others.enter_context(build_lock.build_lock(path, timeout=0))
        except TransientError:
            return
        builders.append(number)

    def unlink_late(lock, missing_ok=False):
        """A second process tries to build just before the first removes the lock's file."""
        monkeypatch.setattr(Path, "unlink", unlink)
        begin(2)
        unlink(lock, missing_ok)

    with ExitStack() as others:
        with build_lock.build_lock(path, timeout=0):
            monkeypatch.setattr(Path, "unlink", unlink_late)
        begin(3)
        assert builders == [3]
