import dataclasses
import enum
import hashlib
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megalowbit.engine.checkpoints.checkpoint_engine import AtomicCheckpointEngine, plain_data
from megalowbit.errors import UserError


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def test_the_checkpoint_engine_loads_the_files_it_saved(tmp_path):
    engine = AtomicCheckpointEngine()
    engine.makedirs(str(tmp_path / "x"))
    path = str(tmp_path / "x" / "state.pt")
    engine.save({"weight": torch.arange(3.0), "step": 4}, path)
    assert engine.commit(SimpleNamespace(tag="x"))
    assert names_in(tmp_path / "x") == ["state.pt"]
    loaded = engine.load(path)
    assert loaded["step"] == 4
    assert loaded["weight"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("action", ["save", "makedirs"])
def test_a_failure_is_raised_once_by_commit(tmp_path, action):
    (tmp_path / "file").write_text("not a folder")
    engine = AtomicCheckpointEngine()
    path = str(tmp_path / "file" / "state.pt")
    engine.save({}, path) if action == "save" else engine.makedirs(path)
    with pytest.raises(UserError, match=r"checkpoint tag was not written \(rank 0\): .*Not a directory"):
        engine.commit(SimpleNamespace(tag="tag"))
    assert engine.commit(SimpleNamespace(tag="next"))


def test_an_object_that_cannot_be_pickled_is_a_failure_like_any_other(tmp_path):
    engine = AtomicCheckpointEngine()
    engine.save({"callable": lambda: 1}, str(tmp_path / "state.pt"))
    with pytest.raises(UserError, match="pickle"):
        engine.commit(SimpleNamespace(tag="tag"))
    assert names_in(tmp_path) == []


class Scaler:
    def state_dict(self):
        return {"scale": 8.0}


def test_objects_become_plain_data():
    address = dataclasses.make_dataclass("address", ["start", "numel"])(3, 4)
    stage = enum.IntEnum("Stage", {"weights": 3}).weights
    state = {
        "loss_scaler": Scaler(), "map": OrderedDict(a=address), "stage": stage, "rate": np.float64(0.5),
        "pair": (1, [2, {3}]), "shape": torch.Size([2]),
    }  # fmt: skip
    found = plain_data(state)
    assert found == {
        "loss_scaler": {"scale": 8.0}, "map": {"a": {"start": 3, "numel": 4}}, "stage": 3, "rate": 0.5,
        "pair": (1, [2, {3}]), "shape": torch.Size([2]),
    }  # fmt: skip
    assert [type(found[key]) for key in ("stage", "rate", "map")] == [int, float, OrderedDict]


def test_a_scaler_without_a_state_is_rejected():
    with pytest.raises(TypeError, match="loss scaler, object, could only be pickled"):
        plain_data({"loss_scaler": object()})


def test_a_stock_checkpoint_file_is_rejected_in_one_line(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 1, False)
    torch.save({"optimizer_state_dict": {"loss_scaler": scaler}}, tmp_path / "state.pt")
    with pytest.raises(UserError, match=r"DynamicLossScaler.*not written by this version") as caught:
        AtomicCheckpointEngine().load(str(tmp_path / "state.pt"))
    assert "\n" not in str(caught.value)


def test_file_facts_are_name_size_and_checksum(tmp_path):
    engine = AtomicCheckpointEngine()
    engine.save({"weight": torch.arange(1000.0)}, str(tmp_path / "state.pt"))
    engine.save({}, str(tmp_path.parent / "elsewhere.pt"))
    (fact,) = engine.take_facts(tmp_path)
    content = (tmp_path / "state.pt").read_bytes()
    assert fact == ("state.pt", len(content), hashlib.sha256(content).hexdigest())
    assert engine.take_facts(tmp_path) == []
