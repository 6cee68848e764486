import os

import pytest

from megalowbit.doctor import disk as disk_module
from megalowbit.doctor.disk import CHUNK, file_system_of, is_shared, measure_disk, nearest_folder


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(disk_module, "MOST_BYTES", 2 * CHUNK)


def test_the_folder_above_is_measured_and_nothing_is_left(tmp_path):
    before = sorted(tmp_path.rglob("*"))
    disk, _ = measure_disk(tmp_path / "runs" / "first")
    assert disk.folder == str(tmp_path)
    assert disk.write > 0 < disk.read
    assert sorted(tmp_path.rglob("*")) == before
    status = os.statvfs(tmp_path)
    assert disk.free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.05)


def test_its_file_has_no_name_while_it_is_written(tmp_path, monkeypatch):
    seen, calls, fsync = [], [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: (calls.append(number), seen.extend(tmp_path.iterdir()), fsync(number))
    )
    measure_disk(tmp_path)
    assert calls
    assert seen == []


def test_without_measurements_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "_speeds", lambda folder, free: pytest.fail("measured"))
    disk, found = measure_disk(tmp_path, is_measured=False)
    assert (disk.write, disk.read, found) == (None, None, [])


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    def refuse(folder, free):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk_module, "_speeds", refuse)
    disk, (found,) = measure_disk(tmp_path)
    assert (found.level, found.code) == ("problem", "disk-write")
    assert "Permission denied" in found.text
    assert disk.write is None


def test_a_slow_disk_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "_speeds", lambda folder, free: (50e6, 1e9))
    _, (found,) = measure_disk(tmp_path)
    assert (found.level, found.code) == ("warning", "disk-slow")
    monkeypatch.setattr(disk_module, "_speeds", lambda folder, free: (500e6, 1e9))
    assert measure_disk(tmp_path)[1] == []


def test_file_systems():
    assert file_system_of(nearest_folder(disk_module.Path("/proc/self"))) == "proc"
    assert is_shared("nfs4")
    assert is_shared("fuse.sshfs")
    assert not is_shared("ext4")
