import fcntl
import os
import signal

import pytest

from megalowbit.errors import TransientError, UserError
from megalowbit.hf.folders.unfinished import JOURNAL, resumable_folder, unfinished

KEY = {"source": [1, 2]}


def attempt(folder, error=None, key=KEY, names=("a", "b")):
    """Write files and note them, unless they are there already; returns the names that were."""
    with resumable_folder(folder, key) as draft:
        found = sorted(draft.finished)
        for name in names:
            if name not in draft.finished:
                (draft.path / name).write_text(name)
                draft.note(name)
        (draft.path / "half").write_text("not noted")
        if error is not None:
            raise error
    return found


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), TransientError("away")])
def test_an_interruption_keeps_the_finished_files_for_the_next_attempt(tmp_path, error):
    with pytest.raises(type(error)):
        attempt(tmp_path / "x", error)
    (draft,) = unfinished(tmp_path / "x")
    assert {path.name for path in draft.iterdir()} == {"a", "b", "half", JOURNAL}
    assert attempt(tmp_path / "x") == ["a", "b"]
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"a", "b", "half"}
    assert not unfinished(tmp_path / "x")


def test_a_folder_whose_name_begins_alike_keeps_its_draft(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path / "llama-3.1", KeyboardInterrupt())
    assert not unfinished(tmp_path / "llama-3")
    attempt(tmp_path / "llama-3")
    assert attempt(tmp_path / "llama-3.1") == ["a", "b"]


@pytest.mark.parametrize("error", [UserError("wrong"), KeyError("defect"), OSError(28, "full")])
def test_any_other_error_leaves_nothing(tmp_path, error):
    with pytest.raises((UserError, KeyError)):
        attempt(tmp_path / "x", error)
    assert not list(tmp_path.iterdir())


def test_an_interruption_before_the_first_file_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path / "x", KeyboardInterrupt(), names=())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_files", [0, 1])
def test_the_draft_of_a_killed_process_is_continued(tmp_path, num_files):
    child = os.fork()
    if child == 0:
        with resumable_folder(tmp_path / "x", KEY) as draft:
            for name in "ab"[:num_files]:
                (draft.path / name).write_text(name)
                draft.note(name)
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(unfinished(tmp_path / "x")) == 1
    assert attempt(tmp_path / "x") == ["a"][:num_files]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def interrupted(folder):
    with pytest.raises(KeyboardInterrupt):
        attempt(folder, KeyboardInterrupt())
    return unfinished(folder)[0]


def test_a_draft_with_another_key_is_removed(tmp_path):
    interrupted(tmp_path / "x")
    assert attempt(tmp_path / "x", key={"source": [1, 3]}) == []
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("damage", ["changed", "shorter", "missing", "link", "folder"])
def test_only_whole_files_are_kept(tmp_path, damage):
    draft = interrupted(tmp_path / "x")
    path = draft / "a"
    path.unlink()
    if damage in ("changed", "shorter"):
        path.write_text("b" if damage == "changed" else "")
    elif damage == "link":
        (tmp_path / "a").write_text("a")
        path.symlink_to(tmp_path / "a")
    elif damage == "folder":
        path.mkdir()
        path.rmdir()
    assert attempt(tmp_path / "x") == ["b"]
    assert (tmp_path / "x" / "a").read_text() == "a"
    assert not (tmp_path / "x" / "a").is_symlink()


def test_a_journal_that_leads_out_of_the_draft_is_not_followed(tmp_path):
    draft = interrupted(tmp_path / "x")
    (tmp_path / "a").write_text("a")
    journal = draft / JOURNAL
    journal.write_text(journal.read_text().replace('"name": "a"', '"name": "../a"'))
    assert attempt(tmp_path / "x") == ["b"]
    assert (tmp_path / "a").read_text() == "a"


def test_the_draft_of_a_running_process_is_left_alone(tmp_path):
    draft = interrupted(tmp_path / "x")
    descriptor = os.open(draft, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert attempt(tmp_path / "x") == []
    os.close(descriptor)
    assert unfinished(tmp_path / "x") == [draft]


def test_a_draft_of_another_kind_is_left_alone(tmp_path):
    other = tmp_path / ".x.0123abcd.tmp"
    other.mkdir()
    (tmp_path / ".x.link.tmp").symlink_to(other)
    attempt(tmp_path / "x")
    assert other.is_dir()
