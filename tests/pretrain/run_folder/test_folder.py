import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from unprivileged import said_without_privileges

from megalowbit.errors import UserError
from megalowbit.pretrain.run import _hold
from megalowbit.pretrain.run_folder.folder import RunFolder, claim, exported_step, run_folder_of

ROOT = Path(__file__).parents[3]


def test_a_new_run_gets_the_next_free_number(tmp_path):
    names = [claim("gpt2", run_dir=None, is_resume=False, root=tmp_path).path.name for _ in range(3)]
    assert names == ["gpt2", "gpt2-2", "gpt2-3"]


def test_an_export_is_of_the_step_in_its_name_or_of_the_last(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"megalowbit": {"run": {"steps": 7}}}')
    names = {"hf": 7, "hf-step-00000005": 5, "hf-step-00000005-2": 5, "hf-2": None, "x/hf": None, "": None}
    for name, step in names.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        assert exported_step(tmp_path / name) == step, name
    monkeypatch.chdir(tmp_path)
    assert exported_step(Path("hf")) == 7
    assert exported_step(tmp_path.parent) is None


def test_numbers_of_longer_names_do_not_count(tmp_path):
    (tmp_path / "gpt2-large").mkdir()
    (tmp_path / "gpt2-2x").mkdir()
    assert claim("gpt2", run_dir=None, is_resume=False, root=tmp_path).path.name == "gpt2"


def test_numbers_of_removed_folders_are_not_reused(tmp_path):
    (tmp_path / "gpt2-2").mkdir()
    assert claim("gpt2", run_dir=None, is_resume=False, root=tmp_path).path.name == "gpt2-3"


def test_resume_continues_the_newest_or_starts_the_first(tmp_path):
    assert claim("gpt2", run_dir=None, is_resume=True, root=tmp_path).path.name == "gpt2"
    for name in ("gpt2-2", "gpt2-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "gpt2-11").mkdir()  # a start that failed before its first record
    assert claim("gpt2", run_dir=None, is_resume=True, root=tmp_path).path.name == "gpt2-10"


@pytest.mark.parametrize("left", ["saved.json", "checkpoints"])
def test_resume_finds_a_run_without_its_configuration(tmp_path, left):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / left).mkdir()
    assert claim("gpt2", run_dir=None, is_resume=True, root=tmp_path).path.name == "gpt2"


def test_a_default_folder_with_a_missing_link_target_is_not_replaced(tmp_path):
    (tmp_path / "gpt2").symlink_to(tmp_path / "scratch")
    with pytest.raises(UserError, match=r"gpt2 is a link to .*scratch', which does not exist: put it back"):
        claim("gpt2", run_dir=None, is_resume=True, root=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]
    assert claim("gpt2", run_dir=None, is_resume=False, root=tmp_path).path.name == "gpt2-2"


def test_a_named_folder_with_content_is_rejected_and_unchanged(tmp_path):
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


def test_a_folder_whose_name_is_not_utf8_is_refused_before_anything_is_written(tmp_path):
    folder = Path(os.fsdecode(bytes(tmp_path / "run") + b"\xff"))
    with pytest.raises(UserError, match=r"run.udcff' is not UTF-8: choose another"):
        claim("gpt2", run_dir=folder, is_resume=False)
    assert not list(tmp_path.iterdir())


def test_the_resolved_configuration_is_written_whole(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config({"a": [1, "β"]})
    assert json.loads(folder.config.read_text(encoding="utf-8")) == {"a": [1, "β"]}
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_the_lock_names_the_attempt_that_holds_or_held_the_folder(tmp_path, monkeypatch):
    folder, lock = RunFolder(tmp_path), tmp_path / ".lock"
    monkeypatch.setenv("MEGALOWBIT_TRY", "123456-10")
    with folder.locked():
        monkeypatch.setenv("MEGALOWBIT_TRY", "7-0")
        with pytest.raises(UserError, match="in use"), folder.locked():
            pass
        assert lock.read_text() == "123456-10\n"
    with folder.locked():
        assert lock.read_text() == "7-0\n"
    monkeypatch.delenv("MEGALOWBIT_TRY")
    with folder.locked():
        assert lock.read_text() == "no job script\n"


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder", "another program's"])
def test_a_foreign_lock_file_is_rejected_and_unchanged(tmp_path, kind):
    lock, precious = tmp_path / "run" / ".lock", tmp_path / "precious"
    lock.parent.mkdir()
    precious.write_text("keep me")
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    elif kind == "another program's":
        lock.write_text("x" * 5000)
    else:
        lock.symlink_to(precious if kind == "link" else tmp_path / "none")
    message = r"\.lock (is a link or not a regular file|was not written by a run)"
    with pytest.raises(UserError, match=message), RunFolder(lock.parent).locked():
        pytest.fail("held")
    assert precious.read_text() == "keep me"
    assert not (tmp_path / "none").exists()
    assert lock.is_symlink() or lock.exists()


def test_a_locked_folder_is_rejected_for_another_job_until_it_is_released(tmp_path):
    code = (
        "import pathlib, sys, time\n"
        "from megalowbit.pretrain.run_folder.folder import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).locked():\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert other.stdout.readline() == "held\n"
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match="in use by another job"), folder.locked():
        pass
    other.kill()
    other.wait()
    with folder.locked():
        pass


def test_a_start_that_fails_leaves_no_new_folder_behind(tmp_path):
    folder = claim("gpt2", run_dir=None, is_resume=False, root=tmp_path)

    def fail():
        with folder.locked():
            raise UserError("no such corpus")

    with pytest.raises(UserError, match="no such corpus"):
        fail()
    assert not folder.path.exists()


def test_a_failure_keeps_folders_with_records_and_folders_of_the_user(tmp_path):
    recorded = claim("gpt2", run_dir=None, is_resume=False, root=tmp_path)
    with recorded.locked():
        recorded.write_config({})
    given = tmp_path / "given"
    given.mkdir()
    with claim("gpt2", run_dir=given, is_resume=False).locked():
        pass
    assert recorded.is_started
    assert given.is_dir()
    assert claim("gpt2", run_dir=given, is_resume=False).path == given


def test_an_older_export_is_set_aside_and_never_lost(tmp_path):
    folder = RunFolder(tmp_path)
    for content in ("first", "second"):
        folder.hf.mkdir()
        (folder.hf / "model").write_text(content)
        folder.rename_export(4)
    assert (tmp_path / "hf-step-00000004" / "model").read_text() == "first"
    assert (tmp_path / "hf-step-00000004-2" / "model").read_text() == "second"
    folder.rename_export(8)
    assert not (tmp_path / "hf-step-00000008").exists()


def test_the_next_job_removes_half_written_files_of_a_killed_one(tmp_path):
    folder = claim("gpt2", run_dir=tmp_path / "run", is_resume=False)
    (folder.path / ".hf.0123abcd.tmp").mkdir()
    (folder.path / ".hf.0123abcd.tmp" / "model.safetensors").write_text("half")
    for name in (".config.json.0123abcd.tmp", ".metrics.jsonl.0123abcd.tmp", ".mine.0123abcd.tmp"):
        (folder.path / name).write_text("half")
    removed = folder.checkpoints / ".step-00000002.0123abcd.tmp"  # an older checkpoint, half removed
    removed.mkdir(parents=True)
    (removed / "rank-0.safetensors").write_text("half")
    with folder.locked():
        left = sorted(path.name for path in folder.path.iterdir())
        assert left == [".lock", ".mine.0123abcd.tmp", "checkpoints"]
        assert not list(folder.checkpoints.iterdir())


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ("[" * 100_000, False),
        ('{"steps": 1e999}', False),
        ('{"steps": 7}', True),
        ('{"steps": 6}', False),
        ('{"st', False),
        ("[]", False),
        (None, False),
    ],
)
def test_a_summary_counts_only_if_it_is_of_the_last_step(tmp_path, summary, expected):
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    assert RunFolder(tmp_path).has_summary_of(7) is expected


def test_an_unwritable_done_file_is_a_one_line_error(tmp_path):
    with pytest.raises(UserError, match=r"gone/DONE cannot be written \(No such file or directory\): free"):
        RunFolder(tmp_path / "gone").mark_done(3)


def test_a_summary_that_is_not_a_regular_file_is_ignored(tmp_path):
    os.mkfifo(tmp_path / "summary.json")
    assert not RunFolder(tmp_path).has_summary_of(7)


def test_a_folder_of_another_user_is_a_one_line_error(tmp_path):
    """Read and entered by all, written by none."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    for path in (run, run / "config.json"):
        path.chmod(0o555)

    def start():
        os.chdir(tmp_path)
        with ExitStack() as stack:
            _hold(stack, claim("x", run_dir=run, is_resume=True))

    line = said_without_privileges(run, start)
    assert line.startswith(f"{run / '.lock'} cannot be opened (Permission denied): make the folder writable")
    (run / "config.json").unlink()
    run.chmod(0o700)
    line = said_without_privileges(tmp_path, start)
    assert line.startswith(f"run folder {run} cannot be ")
    assert "Permission denied" in line


@pytest.mark.parametrize("above", [None, "[1]", "no JSON", '{"model_type": "gpt2"}'])
def test_the_run_of_a_path_is_found_whatever_lies_above(tmp_path, above):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    (run / "config.json").write_text('{"megalowbit": {}}')
    for path in (run, run / "hf", run / "checkpoints" / "step-00000004"):
        assert run_folder_of(path) == run
    if above is not None:
        (tmp_path / "config.json").write_text(above)
    (tmp_path / "model").mkdir()
    assert run_folder_of(tmp_path / "model") is None


def test_a_damaged_configuration_of_the_path_itself_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"config\.json holds a list"):
        run_folder_of(tmp_path)
