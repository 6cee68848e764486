from types import SimpleNamespace

import pytest
import torch

from megalowbit.engine.checkpoint_engine import AtomicCheckpointEngine
from megalowbit.errors import UserError


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def test_what_the_checkpoint_engine_saves_it_loads(tmp_path):
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
def test_a_failure_waits_for_commit_and_is_told_once(tmp_path, action):
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
