"""A load rejects a wrong checkpoint before it changes anything."""

import errno
import os

import pytest
from small_engines import SGD, make_engine, trained

from megalowbit.engine.checkpoints import save_and_load as checkpoint_io
from megalowbit.engine.checkpoints.save_and_load import remove_checkpoint
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.errors import UserError
from megalowbit.layers.cpu_gemm import VARIABLE, cpu_gemm, use_cpu_gemm


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_the_state_of_another_optimizer_is_refused(tmp_path, stage):
    engine = trained(stage, optimizer=SGD)
    path = CheckpointStore(tmp_path).save(engine, 2, {})
    with pytest.raises(UserError, match="has the state of optimizer SGD, but the engine has AdamW: use SGD"):
        CheckpointStore(tmp_path).load(make_engine(stage), path)
    CheckpointStore(tmp_path).load(make_engine(stage, optimizer=SGD), path)


def test_a_different_recipe_is_reported_before_a_different_shape(tmp_path):
    def save(recipe, width, name):
        return CheckpointStore(tmp_path / name).save(trained(recipe=recipe, width=width), 1, {})

    path = save("nvfp4", 16, "a")
    store = CheckpointStore(tmp_path / "a")
    with pytest.raises(UserError, match=r"saved with recipe nvfp4, but the model has none \(parameter"):
        store.load(make_engine(recipe="bf16", width=32), path)
    with pytest.raises(UserError, match=r"does not fit the model: parameter 0\.weight has shape"):
        store.load(make_engine(recipe="nvfp4", width=32), path)


@pytest.mark.parametrize(("recorded", "continued"), [("fp32", "fp32"), ("absent", "bf16"), (None, "fp32")])
def test_a_resumed_run_multiplies_in_the_dtype_of_its_checkpoint(tmp_path, monkeypatch, recorded, continued):
    engine, store = trained(), CheckpointStore(tmp_path)
    monkeypatch.delenv(VARIABLE)
    state = checkpoint_io._engine_state
    use_cpu_gemm("fp32")
    if recorded != "fp32":  # an earlier version, or another device

        def other_state(*arguments):
            own = state(*arguments)
            del own["cpu_gemm"]
            return own if recorded == "absent" else {**own, "cpu_gemm": recorded}

        monkeypatch.setattr(checkpoint_io, "_engine_state", other_state)
    path = store.save(engine, 1, {})
    use_cpu_gemm("bf16" if recorded == "fp32" else "fp32")
    store.load(engine, path)
    assert cpu_gemm() == continued


@pytest.mark.parametrize(
    ("recipe", "is_earlier", "is_told"),
    [("nvfp4", True, True), ("nvfp4", False, False), ("mxfp4", True, False), ("bf16", True, False)],
)
def test_a_run_of_a_version_with_unrounded_tensor_scales_is_told_of_the_change(
    tmp_path, monkeypatch, caplog, recipe, is_earlier, is_told
):
    engine, store, state = trained(recipe=recipe), CheckpointStore(tmp_path), checkpoint_io._engine_state

    def earlier_state(*arguments):
        own = state(*arguments)
        del own["cpu_gemm"]
        return own

    if is_earlier:
        monkeypatch.setattr(checkpoint_io, "_engine_state", earlier_state)
    path = store.save(engine, 1, {})
    caplog.clear()
    store.load(engine, path)
    assert ("tensor scales were not rounded" in caplog.text) == is_told


def test_an_interrupted_removal_leaves_no_apparent_checkpoint(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    path = store.save(trained(), 1, {})

    def fail(*_, **_more):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "unlink", fail)
    remove_checkpoint(path)
    monkeypatch.undo()
    assert store.steps() == []
    assert not path.exists()
    store.save(trained(), 2, {})  # the next save removes the rest
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step-00000002"]


def test_a_checkpoint_that_is_a_link_is_removed_as_a_link(tmp_path):
    store, elsewhere = CheckpointStore(tmp_path / "store", keep=1), tmp_path / "elsewhere"
    store.save(trained(), 1, {}).rename(elsewhere)
    store.path_of(1).symlink_to(elsewhere)
    store.save(trained(), 2, {})
    assert store.steps() == [2]
    store.verify(elsewhere)


def test_damage_of_older_checkpoints_does_not_stop_a_save(tmp_path, caplog):
    store, engine = CheckpointStore(tmp_path, keep=2), trained()
    texts = ['{"format": 1, "files": [{"name": "x", "size": 1e999, "sha256": ""}]}', "[" * 100_000, "\0"]
    for number, text in enumerate(texts, start=1):
        (store.save(engine, number, {}) / "manifest.json").write_text(text)
    os.mkfifo(store.path_of(4))
    store.path_of(5).write_text("no folder")
    store.path_of(6).symlink_to(tmp_path / "gone")
    for number in (4, 5, 6):
        store.save(engine, number, {})
    assert store.steps() == [5, 6]
    assert len(list(tmp_path.glob("*.damaged"))) == 6
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    store.save(engine, 7, {})
    store.remove_after(6)
    assert store.steps() == [6]
    assert caplog.text.count("latest cannot be written") == 2


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_checkpoint_is_kept_only_if_a_rank_is_lost_after_its_manifest(tmp_path, monkeypatch, is_complete):
    store, agree, calls = CheckpointStore(tmp_path), checkpoint_io.agree, []

    def agree_and_lose_a_rank(decide, *arguments, **named):
        calls.append(decide)
        is_commit = len(calls) == 2
        if is_complete or not is_commit:
            agree(decide, *arguments, **named)
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
        checkpoint_io.save_together(engine, tmp_path / "step-00000001", {}, step=1, is_named_by_user=True)
    assert not (tmp_path / "step-00000001").exists()
