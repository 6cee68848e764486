"""What a load refuses before it changes anything."""

import errno
import os

import pytest
from small_engines import SGD, make_engine, trained

from megalowbit.engine import checkpoint_io
from megalowbit.engine.checkpoint import CheckpointStore
from megalowbit.engine.checkpoint_io import remove_checkpoint
from megalowbit.errors import UserError


@pytest.mark.parametrize("stage", range(4))
def test_the_state_of_another_optimizer_is_refused(tmp_path, stage):
    engine = trained(stage, optimizer=SGD)
    path = CheckpointStore(tmp_path).save(engine, 2, {})
    with pytest.raises(UserError, match="has the state of optimizer SGD, the engine has AdamW: use SGD"):
        CheckpointStore(tmp_path).load(make_engine(stage), path)
    CheckpointStore(tmp_path).load(make_engine(stage, optimizer=SGD), path)


def test_another_recipe_is_named_before_the_shape(tmp_path):
    def save(recipe, width, name):
        return CheckpointStore(tmp_path / name).save(trained(recipe=recipe, width=width), 1, {})

    path = save("nvfp4", 16, "a")
    store = CheckpointStore(tmp_path / "a")
    with pytest.raises(UserError, match=r"saved with recipe nvfp4, the model has none \(parameter"):
        store.load(make_engine(recipe="bf16", width=32), path)
    with pytest.raises(UserError, match=r"does not fit the model: parameter 0\.weight has shape"):
        store.load(make_engine(recipe="nvfp4", width=32), path)


def test_an_interrupted_removal_does_not_look_like_a_checkpoint(tmp_path, monkeypatch):
    store, names, unlink = CheckpointStore(tmp_path), [], os.unlink
    path = store.save(trained(), 1, {})
    manifest = (path / "manifest.json").read_bytes()
    (path / "manifest.json").unlink()
    for number in range(60):  # its place among them is neither first nor last in any order of a folder
        (path / f"file{number}").touch()
        if number == 30:
            (path / "manifest.json").write_bytes(manifest)
    assert store.steps() == [1]

    def unlink_one(name, **place):
        names.append(name)
        if len(names) > 1:
            raise OSError(errno.EIO, "Input/output error")
        unlink(name, **place)

    monkeypatch.setattr(os, "unlink", unlink_one)
    remove_checkpoint(path)
    assert len(names) == 2
    assert len(list(path.iterdir())) == 61
    assert store.steps() == []


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_checkpoint_stays_if_a_rank_is_lost_after_its_manifest_and_only_then(
    tmp_path, monkeypatch, is_complete
):
    store, agree, calls = CheckpointStore(tmp_path), checkpoint_io.agree, []

    def agree_and_lose_a_rank(decide):
        calls.append(decide)
        is_commit = len(calls) == 2
        if is_complete or not is_commit:
            agree(decide)
        if is_commit:
            raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")

    monkeypatch.setattr(checkpoint_io, "agree", agree_and_lose_a_rank)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        store.save(trained(), 1, {})
    assert len(calls) == 2
    assert store.steps() == [1] * is_complete
    assert store.path_of(1).exists() == is_complete


def test_a_checkpoint_that_latest_cannot_name_is_removed(tmp_path, monkeypatch):
    engine = trained()

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_io, "atomic_file", no_space)
    with pytest.raises(UserError, match="No space left on device"):
        checkpoint_io.save_together(engine, tmp_path / "step-00000001", {}, step=1)
    assert not (tmp_path / "step-00000001").exists()
