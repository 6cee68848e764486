"""Locks of builds are named if they are old, wherever torch keeps its extensions."""

import os
import time

import pytest

from megalowbit.engine.versions.extension_locks import (
    STALE_SECONDS,
    extension_folder,
    stale_lock_lines,
    stale_locks,
)


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """A function that makes a lock of some age in the folder that the environment names."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def lock(name, seconds):
        path = tmp_path / name / "lock"
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (time.time() - seconds,) * 2)
        return path

    return lock


def test_only_old_locks_are_named_with_extension_and_remedy(lock):
    old = lock("py311_cu128/cpu_adam", 2 * 3600)
    lock("py311_cu128/async_io", STALE_SECONDS - 60)
    (line,) = stale_lock_lines()
    assert line.startswith(f"{old} is 2.0 hours old: a build of the extension cpu_adam was probably killed")
    assert line.endswith(": remove the file if nothing is compiling")


def test_an_extension_that_is_never_built_and_other_files_are_left_out(lock, tmp_path):
    lock("deepspeed_shm_comm", 1e6)
    (tmp_path / "a" / "lock").mkdir(parents=True)
    os.utime(tmp_path / "a" / "lock", (0, 0))
    assert not stale_lock_lines(never_built={"deepspeed_shm_comm"})
    assert [path.parent.name for path, _ in stale_locks(tmp_path)] == ["deepspeed_shm_comm"]


def test_the_folder_is_that_of_torch(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from torch.utils.cpp_extension import get_default_build_root

    assert str(extension_folder()) == get_default_build_root()
    assert not stale_lock_lines()
