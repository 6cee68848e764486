"""Damaged folders end in a one-line error or in the right weights; nothing else is written or run."""

import random
import shutil

import pytest
import torch
from damaged_folders import damage_hf, damage_start, outcome, same_weights
from tiny_models import tiny_model

from megalowbit.hf.checkpoint import plan_export, plan_import
from megalowbit.hf.training_checkpoint import read_checkpoint

NUM_CASES = 250  # of each kind of folder
SIZES = {"vocab_size": 16, "positions": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
SHARD_SIZE = 2000


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Source folders, checkpoints to start from, and the weights of both."""
    folder, found = tmp_path_factory.mktemp("originals"), []
    for kind, shard_size in (("gpt2", 10**9), ("llama", SHARD_SIZE), ("qwen2", SHARD_SIZE)):
        source, start = folder / kind, folder / f"{kind}-start"
        tiny_model(kind, **SIZES).save_pretrained(source, max_shard_size=shard_size)
        plan_import(source, "nvfp4", shard_size=shard_size).run(start)
        expected = {name: value.clone() for name, value in read_checkpoint(start).state_dict.items()}
        found.append((source, start, expected))
    return found


def to_start(source, out):
    plan_import(source, "nvfp4").run(out)


def to_hf(source, out):
    plan_export(source, torch.float32).run(out, is_verified=True)


@pytest.mark.slow
def test_damaged_hugging_face_folders(tmp_path, monkeypatch, originals):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    chance, outcomes = random.Random(0), []
    for number in range(NUM_CASES):
        source, _, expected = chance.choice(originals)
        place = tmp_path / str(number)
        shutil.copytree(source, place / "source")
        what = f"case {number}, {source.name}: {damage_hf(place / 'source', chance)}"
        is_written = outcome(to_start, place / "source", place / "out", what)
        assert not is_written or same_weights(place / "out", expected), what
        outcomes.append(is_written)
        shutil.rmtree(place)
    assert not list((tmp_path / "work").iterdir())  # no pickle was executed
    assert 10 < sum(outcomes) < NUM_CASES / 2  # some damage is none


@pytest.mark.slow
def test_damaged_checkpoints_to_start_from(tmp_path, monkeypatch, originals):
    monkeypatch.chdir(tmp_path)
    chance, outcomes = random.Random(1), []
    for number in range(NUM_CASES):
        source, start, _ = chance.choice(originals)
        place = tmp_path / str(number)
        shutil.copytree(start, place / "source")
        what = f"case {number}, {start.name}: {damage_start(place / 'source', chance)}"
        out = place / "out"
        is_written = outcome(to_hf, place / "source", out, what)
        if is_written:
            to_start(out, place / "source-again")
            to_start(source, place / "source-expected")
            expected = read_checkpoint(place / "source-expected").state_dict
            assert same_weights(place / "source-again", expected), what
        outcomes.append(is_written)
        shutil.rmtree(place)
    assert 10 < sum(outcomes) < NUM_CASES / 2
