"""`--restart` moves a run aside unchanged, even if interrupted, and repeats it from step 0."""

import os
import shutil

import pytest
from ended_runs import STEPS, Killed, contents, dangle, remove_manifests, rows
from unprivileged import said_without_privileges

from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.pretrain.run import pretrain
from megalowbit.pretrain.run_folder.restart import check_restart


def test_restart_moves_all_files_aside_and_repeats_the_training(resolve, finished):
    notes = finished / "notes.txt"
    notes.write_text("of the user")
    losing = {"checkpoints": remove_manifests, "link": dangle, "nothing": lambda folder: None}
    for number, lose in enumerate(losing.values(), start=1):
        lose(finished)
        ours = {name: data for name, data in contents(finished).items() if not name.startswith("before-")}
        del ours["notes.txt"]
        pretrain(resolve(*STEPS), ProcessIdentity(), run_dir=finished, is_resume=False, is_restart=True)
        assert contents(finished / f"before-restart-{number}") == ours
        assert rows(finished) == [1, 2, 3, 4]
        assert notes.read_text() == "of the user"
        shutil.rmtree(finished.parent / "moved", ignore_errors=True)
    assert os.path.lexists(finished / "before-restart-2" / "checkpoints")
    assert (finished / "DONE").exists()


def test_a_restart_that_fails_or_is_killed_loses_nothing(resolve, finished, monkeypatch):
    arguments = {"run_dir": finished, "is_resume": False, "is_restart": True}
    before = contents(finished)
    (finished / "config.json").unlink()
    with pytest.raises(UserError, match=r"no_such\.txt"):  # found before anything is moved
        pretrain(resolve(*STEPS, "megalowbit.data.corpus=no_such.txt"), ProcessIdentity(), **arguments)
    (finished / "config.json").write_bytes(before["config.json"])
    assert contents(finished) == before
    rename, moved = os.rename, []

    def rename_some(source, target):
        if len(moved) == 4:
            raise Killed
        moved.append(source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_some)
    with pytest.raises(Killed):
        pretrain(resolve(*STEPS), ProcessIdentity(), **arguments)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"had moved some files to before-restart-1\.moving: start"):
        pretrain(resolve(*STEPS), ProcessIdentity(), run_dir=finished, is_resume=True)
    pretrain(resolve(*STEPS), ProcessIdentity(), **arguments)
    assert contents(finished / "before-restart-1") == before
    assert rows(finished) == [1, 2, 3, 4]


def test_a_restart_that_was_killed_after_all_had_moved_is_begun_again(resolve, tmp_path):
    (tmp_path / "run" / "before-restart-1").mkdir(parents=True)
    pretrain(resolve(*STEPS), ProcessIdentity(), run_dir=tmp_path / "run", is_resume=False, is_restart=True)
    assert rows(tmp_path / "run") == [1, 2, 3, 4]
    assert not (tmp_path / "run" / "before-restart-2").exists()


def test_a_folder_that_restart_cannot_read_is_a_one_line_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot be read \(File name too long\): choose another"):
        check_restart(tmp_path / ("a" * 300))
    (tmp_path / "run").mkdir(mode=0)
    said = said_without_privileges(tmp_path, lambda: check_restart(tmp_path / "run"))
    assert said.endswith("run cannot be read (Permission denied): choose another --run-dir")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"is_resume": True}, "--restart and --resume auto cannot be combined"),
        ({"run_dir": None}, "--restart needs a run folder: name it with --run-dir"),
        ({}, "does not hold a run to restart"),
    ],
)
def test_restart_is_for_the_folder_of_a_run(resolve, tmp_path, arguments, message):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    all_arguments = {"run_dir": tmp_path / "model", "is_resume": False, "is_restart": True, **arguments}
    with pytest.raises(UserError, match=message):
        pretrain(resolve(), ProcessIdentity(), **all_arguments)
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
