import json

import pytest

from megalowbit.errors import UserError
from megalowbit.pretrain.run_folder import RunFolder, claim


def test_a_new_run_gets_the_next_free_number(tmp_path):
    names = [claim("gpt2", run_dir=None, is_resume=False, root=tmp_path).path.name for _ in range(3)]
    assert names == ["gpt2", "gpt2-2", "gpt2-3"]


def test_numbers_of_longer_names_do_not_count(tmp_path):
    (tmp_path / "gpt2-large").mkdir()
    (tmp_path / "gpt2-2x").mkdir()
    assert claim("gpt2", run_dir=None, is_resume=False, root=tmp_path).path.name == "gpt2"


def test_a_removed_folder_does_not_bring_back_an_old_number(tmp_path):
    (tmp_path / "gpt2-2").mkdir()
    assert claim("gpt2", run_dir=None, is_resume=False, root=tmp_path).path.name == "gpt2-3"


def test_resume_continues_the_newest_or_starts_the_first(tmp_path):
    assert claim("gpt2", run_dir=None, is_resume=True, root=tmp_path).path.name == "gpt2"
    (tmp_path / "gpt2-2").mkdir()
    (tmp_path / "gpt2-10").mkdir()
    assert claim("gpt2", run_dir=None, is_resume=True, root=tmp_path).path.name == "gpt2-10"


def test_a_named_folder_with_content_is_refused_and_left_alone(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep me")
    with pytest.raises(UserError, match=r"mine is not empty: continue it with --resume auto"):
        claim("gpt2", run_dir=folder, is_resume=False)
    assert (folder / "notes.txt").read_text() == "keep me"
    assert claim("gpt2", run_dir=folder, is_resume=True).path == folder


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        claim("gpt2", run_dir=tmp_path / "file" / "run", is_resume=False)


def test_the_resolved_configuration_is_written_whole(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config({"a": [1, "β"]})
    assert json.loads(folder.config.read_text(encoding="utf-8")) == {"a": [1, "β"]}
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
