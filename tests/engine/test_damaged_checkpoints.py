"""Checkpoints damaged at random: one log line, fallback to the previous checkpoint, no data lost."""

import json
import logging
import random

import pytest
import torch

from megalowbit.durable_files import MANIFEST
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.engine.initialize import initialize


def flip(data, generator):
    place = generator.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << generator.randrange(8)]) + data[place + 1 :]


def truncate(data, generator):
    return data[: generator.randrange(len(data))]


def extend(data, generator):
    return data + generator.randbytes(generator.randrange(1, 20))


def shuffle(data, generator):
    """The same size with other content, like the file of another rank or step."""
    return generator.randbytes(len(data))


def remove(data, generator):
    return None


DAMAGES = (flip, truncate, extend, shuffle, remove)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    engine, *_ = initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "megalowbit": {"precision": "bf16"},
        },
    )
    made = CheckpointStore(tmp_path_factory.mktemp("store"))
    for step in (1, 2):
        loss = engine(torch.ones(2, 3).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        made.save(engine, step, {"step": step})
    return made


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def has_the_same_content(one, other):
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@pytest.mark.parametrize("count", [80, pytest.param(500, marks=pytest.mark.slow)])
def test_any_damage_makes_the_store_fall_back_to_the_previous_checkpoint(store, caplog, count):
    generator = random.Random(7)
    newest, before = store.path_of(2), store.path_of(1)
    whole = contents(newest)
    harmless = 0
    for _ in range(count):
        name, damage = generator.choice(sorted(whole)), generator.choice(DAMAGES)
        file = newest / name
        damaged = damage(whole[name], generator)
        if damaged is None:
            file.unlink()
        else:
            file.write_bytes(damaged)
        left = contents(newest)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = CheckpointStore(store.folder).latest()
        if name == MANIFEST and damaged is not None and has_the_same_content(damaged, whole[name]):
            assert found == newest
            harmless += 1
        else:
            assert found == before, f"{damage.__name__} of {name}"
            assert len(caplog.messages) == 1
            assert newest.name in caplog.messages[0]
            assert "\n" not in caplog.messages[0]
        aside = store.folder / f"{newest.name}.damaged"
        if aside.exists():
            assert contents(aside) == left
            aside.rename(newest)
        assert contents(newest) == left
        file.write_bytes(whole[name])
    assert harmless < count / 20
    assert CheckpointStore(store.folder).latest() == newest
