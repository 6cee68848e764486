"""Reshaping in one process; tests/distributed/test_reshape.py tests several ranks."""

import shutil
from dataclasses import replace

import pytest
import torch
from small_engines import step

from megalowbit.checkpoints.contents import CheckpointContents
from megalowbit.engine.checkpoints.layout import describe_layout
from megalowbit.engine.checkpoints.reshape import check_fits
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError


class Counting(torch.nn.Module):
    """A model with a buffer that training changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x.tanh()


def make_engine(stage=0, width=4, optimizer="AdamW", frozen=False):
    torch.manual_seed(stage)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), Counting(), torch.nn.Linear(width, 1))
    model[2].bias.requires_grad = not frozen
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": optimizer, "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "megalowbit": {"precision": "bf16"},
    }
    return initialize(model=model, config=config)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A store with a checkpoint of stage 1, and the loss of the step after it."""
    engine = make_engine(stage=1)
    store = CheckpointStore(tmp_path_factory.mktemp("store"))
    for number in range(2):
        step(engine, number)
    store.save(engine, 2, {"step": 2})
    return store, step(engine, 2)


def test_another_stage_continues_with_weights_moments_and_buffers(saved, caplog):
    store, following = saved
    engine = make_engine(stage=0)
    assert store.load(engine, store.latest()) == {"step": 2}
    assert "ZeRO 1 on 1 data-parallel rank continued on ZeRO 0 on 1 data-parallel rank" in caplog.text
    assert engine.module[1].calls == 2
    assert step(engine, 2) == pytest.approx(following, rel=1e-6)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"width": 5}, r"parameter 0\.weight has shape \(4, 3\) there and \(5, 3\) in the model"),
        ({"frozen": True}, r"parameter 2\.bias was trained"),
        ({"optimizer": "SGD"}, "has the state of optimizer AdamW, but the engine has SGD"),
    ],
)
def test_another_model_or_update_rule_is_rejected_in_one_line(saved, other, message):
    store, _ = saved
    with pytest.raises(UserError, match=message) as caught:
        store.load(make_engine(stage=0, **other), store.latest())
    assert "\n" not in str(caught.value)


def test_a_parameter_of_another_name_is_refused(saved):
    store, _ = saved
    contents = CheckpointContents(store.latest())
    (part,) = contents.layout.slices
    first, *others = part.parameters
    renamed = replace(part, parameters=(replace(first, name="other"), *others))
    with pytest.raises(
        UserError, match=r"parameter 0\.weight has shape \(4, 3\) there and None in the model"
    ):
        check_fits(contents, replace(contents.layout, slices=(renamed,)))


def test_a_checkpoint_without_a_layout_still_loads(saved, tmp_path):
    from megalowbit.durable_files import write_manifest

    engine = make_engine(stage=0)
    store = CheckpointStore(tmp_path)
    step(engine, 0)
    path = store.save(engine, 1, {"step": 1})
    following = step(engine, 1)
    file = path / "mp_rank_00_model_states.pt"
    content = torch.load(file)
    for key in ("layout", "grad_scaler", "rank_files"):
        del content["megalowbit_engine"][key]
    del content["megalowbit_origin"]
    torch.save(content, file)
    (path / "manifest.json").unlink()
    write_manifest(path)
    again = make_engine(stage=0)
    assert CheckpointStore(tmp_path).load(again, path) == {"step": 1}
    assert step(again, 1) == following
    contents = CheckpointContents(path)
    assert contents.layout is None
    assert contents.weight("0.weight").dtype == torch.bfloat16
    shutil.rmtree(path)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_the_layout_lists_every_parameter_and_buffer(stage):
    engine = make_engine(stage=stage)
    layout = describe_layout(engine)
    (part,) = layout.slices
    assert {each.name: each.shape for each in part.parameters} == {
        "0.weight": (4, 3), "0.bias": (4,), "2.weight": (1, 4), "2.bias": (1,),
    }  # fmt: skip
    assert list(part.buffers) == ["1.calls"]
    layout.check("here")
