import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engines import step

from megalowbit import durable_files as durable
from megalowbit.durable_files import SAVING
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.engine.initialize import initialize
from megalowbit.errors import TransientError, UserError

WEIGHTS = "mp_rank_00_model_states.pt"


def make_engine(width=4, steps=1):
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "megalowbit": {"precision": "bf16"},
    }
    return initialize(model=model, config=config)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A store with checkpoints of steps 1 and 2; read-only for tests."""
    engine = make_engine()
    store = CheckpointStore(tmp_path_factory.mktemp("store"))
    for number in (1, 2):
        step(engine, number)
        store.save(engine, number, {"step": number})
    return store


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of it that a test may damage."""
    shutil.copytree(saved.folder, tmp_path / "copy")
    return CheckpointStore(tmp_path / "copy")


def test_a_loaded_engine_continues_bitwise(tmp_path):
    store, engine = CheckpointStore(tmp_path), make_engine()
    for number in range(3):
        step(engine, number)
    path = store.save(engine, 3, {"anything": [1, {"x": (2, 3)}]})
    expected = [step(engine, number) for number in range(3, 6)]
    other = make_engine()
    assert store.load(other, path) == {"anything": [1, {"x": (2, 3)}]}
    assert [step(other, number) for number in range(3, 6)] == expected
    assert other.global_steps == 6


def test_the_manifest_names_every_file_with_size_and_checksum(saved):
    manifest = json.loads((saved.path_of(2) / "manifest.json").read_text())
    (entry,) = manifest["files"]
    assert entry["name"] == WEIGHTS
    assert entry["size"] == (saved.path_of(2) / WEIGHTS).stat().st_size
    assert len(entry["sha256"]) == 64
    assert (saved.folder / "latest").read_text() == "step-00000002"
    assert saved.steps() == [1, 2]
    saved.verify(saved.latest())


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_truncated_or_missing_file_is_detected(saved, tmp_path, data):
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved.folder, folder)
    store = CheckpointStore(folder)
    file = store.path_of(2) / WEIGHTS
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["flip", "truncate", "remove"]))
    if kind == "flip":
        content[place] ^= data.draw(st.integers(1, 255))
        file.write_bytes(content)
    elif kind == "truncate":
        file.write_bytes(content[:place])
    else:
        file.unlink()
    with pytest.raises(UserError, match=WEIGHTS) as caught:
        store.verify(store.path_of(2))
    assert str(store.path_of(1)) in str(caught.value)  # the remedy: the previous checkpoint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": [1]}', '{"files": [{"name": "x"}]}', "\0"])
def test_a_damaged_manifest_is_named(copied, text):
    (copied.path_of(2) / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        copied.verify(copied.path_of(2))


def test_an_incomplete_checkpoint_is_skipped_and_logged(copied, caplog):
    (copied.path_of(2) / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert copied.latest() == copied.path_of(1)
    assert "step-00000002 is incomplete" in caplog.text
    assert copied.steps() == [1]
    with pytest.raises(UserError, match="step-00000002 is incomplete"):
        copied.verify(copied.path_of(2))


def test_an_incomplete_checkpoint_of_the_same_step_is_replaced(copied):
    (copied.path_of(2) / "manifest.json").unlink()
    (copied.path_of(2) / SAVING).touch()
    (copied.path_of(2) / "stale").write_text("x")
    path = copied.save(make_engine(), 2, {})
    copied.verify(path)
    assert not (path / "stale").exists()
    assert not list(copied.folder.glob("*.damaged*"))


def test_a_checkpoint_without_its_manifest_is_never_removed(copied, caplog):
    """Neither by a save of its step, nor by the removal of older ones, nor by a rollback."""
    store, engine = CheckpointStore(copied.folder, keep=1), make_engine()
    kept = {}
    for number in (1, 2):
        path = store.path_of(number)
        (path / "manifest.json").unlink()
        kept[f"{path.name}.damaged"] = sorted((each.name, each.read_bytes()) for each in path.iterdir())
    store.save(engine, 2, {})  # replaces one and is newer than the other
    later = store.path_of(3)
    shutil.copytree(store.path_of(2), later)
    (later / "manifest.json").unlink()
    kept[f"{later.name}.damaged"] = sorted((each.name, each.read_bytes()) for each in later.iterdir())
    store.remove_after(2)
    found = {
        path.name: sorted((each.name, each.read_bytes()) for each in path.iterdir())
        for path in store.folder.glob("*.damaged")
    }
    assert found == kept
    assert caplog.text.count("has no manifest.json") == 3
    assert store.steps() == [2]
    store.verify(store.path_of(2))


def test_a_complete_checkpoint_is_never_overwritten(copied):
    before = (copied.path_of(2) / WEIGHTS).read_bytes()
    with pytest.raises(UserError, match="already exists and is not overwritten"):
        copied.save(make_engine(), 2, {})
    assert (copied.path_of(2) / WEIGHTS).read_bytes() == before


def test_only_the_newest_checkpoints_are_kept_and_leftovers_are_removed(tmp_path):
    store, engine = CheckpointStore(tmp_path, keep=2), make_engine()
    (tmp_path / "step-00000001").mkdir()  # left by a killed process
    (tmp_path / "step-00000001" / SAVING).touch()
    (tmp_path / "notes").mkdir()
    for number in range(2, 6):
        store.save(engine, number, {})
    assert store.steps() == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest", "notes", "step-00000004", "step-00000005"
    ]  # fmt: skip


def test_a_missing_folder_has_no_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    assert (store.latest(), store.steps()) == (None, [])
    with pytest.raises(UserError, match="does not exist: there is no other checkpoint here"):
        store.verify(store.path_of(3))


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="Not a directory; free space or choose another folder"):
        CheckpointStore(tmp_path / "file").save(make_engine(), 1, {})


def test_a_checkpoint_of_another_model_is_refused(saved):
    with pytest.raises(UserError, match="does not fit the model"):
        saved.load(make_engine(width=5), saved.path_of(2))


def test_saving_in_the_middle_of_accumulation_is_refused(tmp_path):
    engine = make_engine(steps=2)
    step(engine, 0)
    with pytest.raises(UserError, match="between optimizer steps"):
        CheckpointStore(tmp_path).save(engine, 1, {})


@pytest.mark.slow
def test_listing_checkpoints_does_not_import_deepspeed(saved):
    code = (
        "import sys; from megalowbit.engine.checkpoints.store import CheckpointStore; "
        f"store = CheckpointStore({str(saved.folder)!r}); store.verify(store.latest()); "
        "sys.exit('deepspeed' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_no_checkpoint_is_rejected(tmp_path, keep):
    with pytest.raises(UserError, match="keep must be"):
        CheckpointStore(tmp_path, keep=keep)


def damage(store, number):
    file = store.path_of(number) / WEIGHTS
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_moved_aside_and_the_previous_one_is_used(copied, caplog):
    damage(copied, 2)
    content = (copied.path_of(2) / WEIGHTS).read_bytes()
    with caplog.at_level(logging.WARNING):
        assert copied.latest() == copied.path_of(1)
    (line,) = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert "step-00000002 is damaged: mp_rank_00_model_states.pt has SHA-256" in line
    assert line.endswith("moved to step-00000002.damaged")
    assert (copied.folder / "step-00000002.damaged" / WEIGHTS).read_bytes() == content
    assert copied.steps() == [1]
    engine = make_engine()
    copied.load(engine, copied.latest())
    copied.verify(copied.save(engine, 2, {}))  # its step can be saved again
    damage(copied, 2)
    assert CheckpointStore(copied.folder).latest() == copied.path_of(1)
    assert (copied.folder / "step-00000002.damaged-2").is_dir()


@pytest.mark.parametrize("loss", ["truncated", "missing", "manifest", "no files", "not named", "superfluous"])
def test_every_kind_of_damage_falls_back_to_the_previous_checkpoint(copied, loss):
    file = copied.path_of(2) / WEIGHTS
    if loss == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif loss == "missing":
        file.unlink()
    elif loss == "superfluous":
        shutil.copy(file, file.with_name("mp_rank_01_model_states.pt"))
    else:
        rest = [{"name": "x", "size": 0, "sha256": hashlib.sha256().hexdigest()}]
        (file.parent / "x").touch()
        text = {"manifest": "{", "no files": '{"format": 1, "files": []}'}
        if loss == "not named":
            file.rename(file.with_suffix(".away"))
        rewritten = json.dumps({"format": 1, "files": rest})
        (copied.path_of(2) / "manifest.json").write_text(text.get(loss, rewritten))
    assert copied.latest() == copied.path_of(1)
    assert (copied.folder / "step-00000002.damaged").is_dir()


def unreadable(number):
    def fail(*_, **_more):
        raise OSError(number, os.strerror(number))

    return fail


def test_an_unavailable_file_system_does_not_count_as_damage(copied, monkeypatch):
    before = sorted(path.name for path in copied.folder.iterdir())
    monkeypatch.setattr(durable, "sha256_of", unreadable(errno.ESTALE))
    with pytest.raises(TransientError, match=r"step-00000002: .* cannot be read \(Stale file handle\): try"):
        copied.latest()
    monkeypatch.setattr(durable, "read_manifest", unreadable(errno.ESTALE))
    copied._prune(copied.path_of(2), [])
    assert sorted(path.name for path in copied.folder.iterdir()) == before
    monkeypatch.undo()
    assert copied.latest() == copied.path_of(2)


def test_a_file_that_the_disk_cannot_read_counts_as_damage(copied, monkeypatch):
    real, bad = durable.sha256_of, copied.path_of(2)

    def read(path):
        return unreadable(errno.EIO)() if bad in path.parents else real(path)

    monkeypatch.setattr(durable, "sha256_of", read)
    assert copied.latest() == copied.path_of(1)
    assert (copied.folder / "step-00000002.damaged").is_dir()


def test_an_error_is_raised_if_all_checkpoints_are_damaged(copied):
    damage(copied, 1)
    damage(copied, 2)
    for store in (copied, copied, CheckpointStore(copied.folder)):  # nor on another start
        with pytest.raises(
            UserError, match=r"all 2 checkpoints in .* are damaged \(newest: step-00000002\.dam"
        ):
            store.latest()
    aside = copied.folder / "step-00000001.damaged"
    aside.rename(copied.path_of(1))
    damage(copied, 1)  # flip the same bit back
    assert copied.latest() == copied.path_of(1)


def test_a_run_continued_from_an_earlier_step_keeps_its_new_checkpoints(tmp_path):
    store, engine = CheckpointStore(tmp_path), make_engine()
    for number in (10, 20, 30):
        store.save(engine, number, {})
    store.load(engine, store.path_of(10))
    store = CheckpointStore(tmp_path, keep=2)
    store.verify(store.save(engine, 15, {}))
    assert store.steps() == [15, 20, 30]
    store.save(engine, 40, {})
    assert store.steps() == [30, 40]


def test_a_checkpoint_with_another_scaler_is_rejected(saved):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    engine = make_engine()
    engine.optimizer.loss_scaler = LossScaler(scale=1)
    with pytest.raises(UserError, match=r"loss scaler is a deepspeed.*LossScaler, not the one configured in"):
        saved.load(engine, saved.path_of(2))


def test_pruning_counts_complete_checkpoints_and_never_removes_damaged_ones(tmp_path):
    store, engine = CheckpointStore(tmp_path, keep=2), make_engine()
    for number in (1, 2):
        store.save(engine, number, {})
    (store.path_of(2) / WEIGHTS).write_bytes(b"short")
    (tmp_path / ".latest.0123abcd.tmp").write_text("draft of a killed process")
    store.save(engine, 3, {})
    assert store.steps() == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest", "step-00000001", "step-00000002.damaged", "step-00000003"
    ]  # fmt: skip


def test_objects_that_could_only_be_pickled_are_rejected_on_save(tmp_path):
    store = CheckpointStore(tmp_path)
    message = r"note is a builtins\.object, which could only be pickled; do not save this object"
    with pytest.raises(UserError, match=message) as caught:
        store.save(make_engine(), 1, {"note": object()})
    assert "free space" not in str(caught.value)
    assert store.latest() is None


def test_latest_can_be_limited_to_a_step_and_to_multiples_of_an_interval(tmp_path):
    store, engine = CheckpointStore(tmp_path), make_engine()
    for number in (2, 4, 5, 6):
        store.save(engine, number, {})
    asked = [{}, {"until": 5}, {"until": 5, "every": 2}, {"until": 1}, {"every": 7}]
    found = [store.latest(**each) for each in asked]
    assert found == [store.path_of(6), store.path_of(5), store.path_of(4), None, None]
    damaged = store.path_of(2) / WEIGHTS
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert store.latest(until=3) is None  # all that match are damaged, but others are not
    assert store.steps() == [4, 5, 6]


def test_checkpoints_of_steps_that_will_be_repeated_are_removed(tmp_path):
    store, engine = CheckpointStore(tmp_path), make_engine()
    for number in (2, 4, 6):
        store.save(engine, number, {"from": "the first time"})
    (tmp_path / "step-00000008").mkdir()  # left by an interrupted save
    (tmp_path / "step-00000008" / SAVING).touch()
    store.remove_after(2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "step-00000002"]
    assert (tmp_path / "latest").read_text() == "step-00000002"
    path = store.save(engine, 4, {"from": "the second time"})
    assert store.load(make_engine(), path) == {"from": "the second time"}


def test_protected_checkpoints_are_kept_whatever_their_age(tmp_path):
    store, engine = CheckpointStore(tmp_path, keep=1), make_engine()
    for number in range(1, 5):
        store.save(engine, number, {}, spare=(1, 3))
    assert store.steps() == [1, 3, 4]
    store.save(engine, 5, {})
    assert store.steps() == [5]


def test_a_name_goes_with_its_checkpoint_also_when_nobody_renews_it(tmp_path):
    store, engine = CheckpointStore(tmp_path, keep=1), make_engine()
    store.save(engine, 1, {})
    store.name_checkpoints({"best": 1, "other": 2})
    store.save(engine, 2, {}, spare=(1,))
    assert (tmp_path / "best").read_text() == "step-00000001"
    store.save(engine, 3, {}, spare=(2,))  # as after a resume without validation
    assert store.steps() == [2, 3]
    assert not (tmp_path / "best").exists()
    assert (tmp_path / "other").read_text() == "step-00000002"
    store.name_checkpoints({"best": 3})
    store.remove_after(2)
    assert not (tmp_path / "best").exists()
    assert (tmp_path / "latest").read_text() == "step-00000002"


def test_names_are_files_with_the_names_of_checkpoints(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    store.name_checkpoints({"best": 3})
    assert (tmp_path / "best").read_text() == "step-00000003"
    store.name_checkpoints({"best": 12345})
    assert (tmp_path / "best").read_text() == "step-00012345"
    for _ in range(2):
        store.name_checkpoints({"best": None})
        assert not (tmp_path / "best").exists()
    store.name_checkpoints({})
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "best").mkdir()
    for step_or_none in (3, None):  # for other programs: no reason to end a run
        store.name_checkpoints({"best": step_or_none})
        assert f"{tmp_path / 'best'} cannot be" in caplog.text
        caplog.clear()
