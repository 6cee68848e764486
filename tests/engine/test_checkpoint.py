import json
import logging
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalowbit.engine.checkpoint import CheckpointStore
from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError

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


def step(engine, seed):
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).bfloat16()
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A store with checkpoints of steps 1 and 2, not to be changed."""
    engine = make_engine()
    store = CheckpointStore(tmp_path_factory.mktemp("store"))
    for number in (1, 2):
        step(engine, number)
        store.save(engine, number, {"step": number})
    return store


@pytest.fixture
def copied(saved, tmp_path):
    """The same, free to be damaged."""
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
def test_any_changed_byte_truncation_or_loss_is_found(saved, tmp_path, data):
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
    assert str(store.path_of(1)) in str(caught.value)  # the remedy: the one before
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": [1]}', '{"files": [{"name": "x"}]}', "\0"])
def test_a_damaged_manifest_is_named(copied, text):
    (copied.path_of(2) / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        copied.verify(copied.path_of(2))


def test_an_incomplete_checkpoint_is_passed_over_with_a_line_in_the_log(copied, caplog):
    (copied.path_of(2) / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert copied.latest() == copied.path_of(1)
    assert "step-00000002 is incomplete" in caplog.text
    assert copied.steps() == [1]
    with pytest.raises(UserError, match="step-00000002 is incomplete"):
        copied.verify(copied.path_of(2))


def test_an_incomplete_checkpoint_of_the_same_step_is_replaced(copied):
    (copied.path_of(2) / "manifest.json").unlink()
    (copied.path_of(2) / "stale").write_text("x")
    path = copied.save(make_engine(), 2, {})
    copied.verify(path)
    assert not (path / "stale").exists()


def test_a_complete_checkpoint_is_never_overwritten(copied):
    before = (copied.path_of(2) / WEIGHTS).read_bytes()
    with pytest.raises(UserError, match="exists already and is not overwritten"):
        copied.save(make_engine(), 2, {})
    assert (copied.path_of(2) / WEIGHTS).read_bytes() == before


def test_only_the_newest_are_kept_and_leftovers_go(tmp_path):
    store, engine = CheckpointStore(tmp_path, keep=2), make_engine()
    (tmp_path / "step-00000001").mkdir()  # what a killed process left
    (tmp_path / "notes").mkdir()
    for number in range(2, 6):
        store.save(engine, number, {})
    assert store.steps() == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest", "notes", "step-00000004", "step-00000005"
    ]  # fmt: skip


def test_no_folder_has_no_checkpoints(tmp_path):
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


def test_looking_at_checkpoints_does_not_load_deepspeed(saved):
    code = (
        "import sys; from megalowbit.engine.checkpoint import CheckpointStore; "
        f"store = CheckpointStore({str(saved.folder)!r}); store.verify(store.latest()); "
        "sys.exit('deepspeed' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(tmp_path, keep):
    with pytest.raises(UserError, match="keep must be"):
        CheckpointStore(tmp_path, keep=keep)
