import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megalowbit.errors import UserError
from megalowbit.hf.folders.new_folder import new_folder, refuse_existing


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_the_folder_appears_when_the_block_ends(tmp_path):
    with new_folder(tmp_path / "a" / "b") as draft:
        (draft / "file").write_text("content")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "file").read_text() == "content"
    assert names(tmp_path / "a") == ["b"]


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "a").mkdir()
    with new_folder(tmp_path / "a") as draft:
        (draft / "file").touch()
    assert names(tmp_path / "a") == ["file"]


def test_a_failing_block_leaves_no_folder(tmp_path):
    def fail():
        with new_folder(tmp_path / "a") as draft:
            (draft / "file").touch()
            raise KeyError("a defect")

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path) == []


def test_an_existing_folder_is_not_changed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("a", "file"):
        with pytest.raises(UserError, match="already exists and is never overwritten"):
            refuse_existing(tmp_path / name)
    assert (tmp_path / "a" / "mine").read_text() == "precious"


def test_a_folder_that_cannot_be_replaced_is_refused_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, target in (("broken", "nowhere"), ("link", "empty")):
        (tmp_path / name).symlink_to(tmp_path / target)
        with pytest.raises(UserError, match=f"{name} is a link: name the folder itself"):
            refuse_existing(tmp_path / name)
    with pytest.raises(UserError, match="/proc is a mount point: name a folder inside of it"):
        refuse_existing(Path("/proc"))


def test_a_folder_filled_concurrently_is_not_changed(tmp_path):
    def fill_late():
        with new_folder(tmp_path / "a"):
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "theirs").touch()

    with pytest.raises(UserError, match="a has appeared meanwhile and is never overwritten"):
        fill_late()
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["theirs"]


def test_a_too_long_file_name_is_a_one_line_error(tmp_path):
    with pytest.raises(UserError, match=r"xxx cannot be used \(File name too long\)"):
        refuse_existing(tmp_path / ("x" * 256))


def test_the_working_directory_itself_may_be_filled(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with new_folder(Path()) as draft:
        (draft / "file").touch()
    assert names(tmp_path / "a") == ["file"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"file/a cannot be written \(.*\): check the path"),
        new_folder(tmp_path / "file" / "a"),
    ):
        pass


def test_a_full_disk_while_writing_weights_is_a_one_line_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write():
        with new_folder(tmp_path / "a") as draft:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
            try:
                save_file({"weight": torch.zeros(1000)}, draft / "model.safetensors")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(UserError, match=r"/a cannot be written \(.*File too large.*\): check the path"):
        write()
    assert names(tmp_path) == []
