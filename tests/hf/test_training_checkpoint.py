import hashlib
import json
import shutil

import pytest
import torch
from small_engines import make_engine
from start_checkpoints import write_start_checkpoint
from transformers import GPT2Config

from megalowbit.durable_files import MANIFEST, write_manifest
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.errors import UserError
from megalowbit.hf.model import random_model
from megalowbit.hf.training_checkpoint import (
    HEADER_FILE,
    digest_of_weights,
    find_checkpoint,
    is_training_checkpoint,
    read_checkpoint,
)
from megalowbit.layers.recipe import recipe

GPT2 = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "checkpoints"
    step = write_start_checkpoint(random_model(GPT2, seed=1).half(), "nvfp4", folder)
    assert step == folder / (folder / "latest").read_text() == folder / "step-00000000"
    return folder


@pytest.fixture
def folder(tmp_path, original):
    """A copy to damage: run/checkpoints."""
    return shutil.copytree(original, tmp_path / "run" / "checkpoints")


def rewrite(step, content):
    """Save other content under a manifest that fits it."""
    torch.save(content, step / HEADER_FILE)
    data = (step / HEADER_FILE).read_bytes()
    facts = {"name": HEADER_FILE, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (step / MANIFEST).write_text(json.dumps({"format": 1, "files": [facts]}))


def test_the_manifest_holds_size_and_sha256(folder):
    step = folder / "step-00000000"
    expected = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name in (HEADER_FILE, "weights.safetensors")
        for data in [(step / name).read_bytes()]
    ]
    assert json.loads((step / MANIFEST).read_text()) == {"format": 1, "files": expected}


def test_the_engine_loads_it_like_a_checkpoint_it_saved(folder):
    store = CheckpointStore(folder)
    assert store.latest() == folder / "step-00000000"
    store.verify(store.latest())


def test_a_checkpoint_is_found_from_its_run_its_folder_and_itself(folder):
    shutil.copytree(folder / "step-00000000", folder / "step-00000040")
    assert find_checkpoint(folder.parent) == folder / "step-00000040"
    assert find_checkpoint(folder) == folder / "step-00000040"
    assert find_checkpoint(folder / "step-00000000") == folder / "step-00000000"
    for path in (folder.parent, folder, folder / "step-00000040"):
        assert is_training_checkpoint(path)
    assert not is_training_checkpoint(folder.parent.parent)


def test_the_digest_of_weights_changes_with_them_and_not_with_the_place(folder, tmp_path):
    other = tmp_path / "copied"
    shutil.copytree(folder, other)
    assert digest_of_weights(folder) == digest_of_weights(other)
    step = find_checkpoint(other)
    assert digest_of_weights(step) == digest_of_weights(other)
    content = json.loads((step / "manifest.json").read_text())
    content["files"][0]["sha256"] = "0" * 64
    (step / "manifest.json").write_text(json.dumps(content))
    assert digest_of_weights(folder) != digest_of_weights(other)
    with pytest.raises(
        UserError, match="has no weights: name a Hugging Face folder or a training checkpoint"
    ):
        digest_of_weights(tmp_path / "nothing")


def test_a_place_without_a_complete_checkpoint_is_refused(folder):
    with pytest.raises(UserError, match="no complete training checkpoint in"):
        find_checkpoint(folder / "nowhere")
    (folder / "step-00000000" / MANIFEST).unlink()
    assert is_training_checkpoint(folder)
    with pytest.raises(UserError, match="no complete training checkpoint in"):
        read_checkpoint(folder.parent)


def test_using_an_older_checkpoint_is_reported(folder, caplog):
    read_checkpoint(folder.parent)
    assert not caplog.records
    (folder / "step-00000007").mkdir()
    (folder / "step-00000009.damaged").mkdir()
    read_checkpoint(folder.parent)
    (record,) = caplog.records
    later = "step-00000007, step-00000009.damaged"
    assert (
        record.getMessage() == f"reading {folder / 'step-00000000'}, because {later} is incomplete or damaged"
    )
    caplog.clear()
    read_checkpoint(folder / "step-00000000")  # named, and so meant
    assert not caplog.records


def test_tools_and_trainer_agree_on_the_newest_also_when_a_damaged_one_was_removed(folder):
    for step in (5, 40):
        shutil.copytree(folder / "step-00000000", folder / f"step-{step:08d}")
    (folder / "latest").write_text("step-00000040")
    assert find_checkpoint(folder.parent) == CheckpointStore(folder).latest() == folder / "step-00000040"
    (folder / "step-00000040" / MANIFEST).unlink()  # as an interrupted removal leaves it
    assert find_checkpoint(folder.parent) == CheckpointStore(folder).latest() == folder / "step-00000005"
    shutil.rmtree(folder / "step-00000040")  # `latest` still names it
    assert find_checkpoint(folder) == CheckpointStore(folder).latest() == folder / "step-00000005"
    assert read_checkpoint(folder).recipe == recipe("nvfp4")


def cut(step):
    path = step / HEADER_FILE
    path.write_bytes(path.read_bytes()[:-1])


def flip_one_bit(step):
    path = step / HEADER_FILE
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(step):
    (step / HEADER_FILE).write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is damaged"),
        (flip_one_bit, "is damaged"),
        (empty, "is damaged"),
        (lambda step: (step / HEADER_FILE).unlink(), f"{HEADER_FILE} is missing"),
        (lambda step: (step / MANIFEST).unlink(), "is incomplete, it has no manifest.json"),
        (lambda step: (step / MANIFEST).write_text("{"), "is damaged: manifest.json cannot be read"),
        (lambda step: (step / MANIFEST).write_text("[]"), "is damaged: manifest.json cannot be read"),
        (lambda step: (step / MANIFEST).write_text('{"format": 2, "files": []}'), "has format 2, not 1"),
        (lambda step: (step / MANIFEST).write_text('{"format": 1, "files": []}'), "lists no file"),
    ],
)
def test_every_kind_of_damage_is_a_one_line_error_that_names_the_checkpoint(folder, damage, message):
    step = folder / "step-00000000"
    damage(step)
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(step)
    assert str(step) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_program_or_version_is_refused(folder):
    step = folder / "step-00000000"
    rewrite(step, {"module": {}})
    with pytest.raises(UserError, match="was not written by megalowbit"):
        read_checkpoint(step)
    rewrite(step, {"module": {}, "megalowbit": {"format": 9}})
    with pytest.raises(UserError, match="has format 9, not 1"):
        read_checkpoint(step)
    rewrite(step, [1])
    with pytest.raises(UserError, match="holds a list"):
        read_checkpoint(step)


def test_a_checkpoint_of_an_engine_has_no_configuration(tmp_path):
    make_engine().save_checkpoint(str(tmp_path), tag="step-00000001")
    with pytest.raises(
        UserError, match=r"was saved by an engine of mlb\.initialize, without the configuration"
    ):
        read_checkpoint(tmp_path)


class Harmful:
    def __reduce__(self):
        return (print, ("code from a checkpoint has run",))


def test_code_inside_a_checkpoint_is_not_run(folder, capsys):
    step = folder / "step-00000000"
    rewrite(step, {"module": {}, "megalowbit": Harmful()})
    with pytest.raises(UserError, match="is not loaded: it holds objects"):
        read_checkpoint(step)
    assert capsys.readouterr().out == ""


def test_shards_of_several_ranks_without_a_layout_are_refused(folder):
    step = folder / "step-00000000"
    rewrite(step, {"module": {}})
    (step / "mp_rank_01_model_states.pt").write_bytes(b"")
    (step / MANIFEST).unlink()
    write_manifest(step)
    with pytest.raises(UserError, match="has shards and no layout"):
        read_checkpoint(step)
