"""What a load refuses before it changes anything."""

import errno
import os

import pytest
import torch

from megalowbit.engine.checkpoint import CheckpointStore
from megalowbit.engine.checkpoint_io import remove_checkpoint
from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def make_engine(stage=0, *, optimizer=ADAMW, width=16, seed=0, **block):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 16))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
        "megalowbit": {"precision": "bf16", **block},
    }
    return initialize(model=model, config=config)[0]


def step(engine, seed):
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def trained(stage=0, **settings):
    engine = make_engine(stage, **settings)
    step(engine, 0)
    step(engine, 1)
    return engine


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
