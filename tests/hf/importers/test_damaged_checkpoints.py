"""Damaged checkpoints of other programs end in a one-line error or in the right weights.

Nothing else is written, and no code in them runs. See `damaged_checkpoints` for what is damaged.
"""

import random
import shutil
from pathlib import Path

import deepspeed_writer
import megatron_writer
import pytest
from damaged_checkpoints import ANYTHING, damage_deepspeed, damage_megatron
from damaged_folders import outcome, same_weights
from forks import run_processes
from test_deepspeed import to_universal
from tiny_models import tiny_model

from megalowbit.hf.checkpoint import plan_import
from megalowbit.hf.training_checkpoint import read_checkpoint

NUM_CASES = 200  # of each program
NUM_QUICK_CASES = 20
PROGRAM = Path(__file__).parent / "ranks_deepspeed.py"
REAL_CASES = ["bf16 at 0", "fp16 at 2", "bf16 at 3, frozen", "fp32 at 3"]
HALF = ("stage 0", "bf16 at 0")
SIZES = {"vocab_size": 16, "positions": 8, "hidden_size": 8, "num_layers": 2, "num_heads": 2}


def to_start(source, out):
    plan_import(source, "nvfp4").run(out)


def right_weights(out, source, expected):
    """Whether the weights are right; at stage 0 they may be half-precision ones, which a warning says."""
    if source.name not in HALF or same_weights(out, expected):
        return same_weights(out, expected)
    found = read_checkpoint(out).state_dict
    return found.keys() == expected.keys() and all(
        found[name].float().equal(value.bfloat16().float()) for name, value in expected.items()
    )


def with_weights(folders):
    """Folders with the weights that they give undamaged."""
    found = []
    for folder in folders:
        start = folder.parent / f"{folder.name} start"
        to_start(folder, start)
        expected = {name: value.clone() for name, value in read_checkpoint(start).state_dict.items()}
        found.append((folder, expected))
    return found


def written_deepspeed(folder):
    """Checkpoints of every stage, from `deepspeed_writer`."""
    models = [tiny_model(kind, **SIZES) for kind in ("llama", "gpt2")]
    for stage, model in ((0, models[0]), (2, models[0]), (3, models[1])):
        yield deepspeed_writer.write(folder / f"stage {stage}", model, stage=stage)
    yield deepspeed_writer.write_universal(folder / "universal", models[1])


def real_deepspeed(folder):
    """Checkpoints that DeepSpeed wrote on two ranks."""
    codes, outputs = run_processes(PROGRAM, folder, *REAL_CASES, folder=folder, world_size=2)
    assert codes == [0, 0], outputs[0][-3000:]
    for case in REAL_CASES:
        (folder / case / "expected.pt").unlink()
        yield folder / case
    universal = folder / "universal of fp16 at 2"
    to_universal(folder / "fp16 at 2", universal / "global_step3")
    shutil.copy(folder / "fp16 at 2" / "config.json", universal)
    yield universal


def written_megatron(folder):
    """Checkpoints of two tensor-parallel ranks, one with two stages, and former names."""
    layouts = {
        "core": {},
        "stages": {"stages": 2, "names": megatron_writer.FUSED},
        "former": {"names": megatron_writer.FORMER, "version": 2.0},
    }
    for name, layout in layouts.items():
        for kind in ("llama", "gpt2"):
            yield megatron_writer.write(
                folder / f"{kind} {name}", tiny_model(kind, **SIZES), ranks=2, **layout
            )


def check_cases(originals, damage, count, place, seed):
    """Damage copies of the originals; returns which of them were converted nevertheless."""
    chance, outcomes = random.Random(seed), []
    for number in range(count):
        source, expected = chance.choice(originals)
        shutil.copytree(source, place / str(number) / "source")
        what = damage(place / str(number) / "source", chance)
        text = f"case {number}, {source.name}: {what}"
        out = place / str(number) / "out"
        is_written = outcome(to_start, place / str(number) / "source", out, text)
        assert not is_written or what.startswith(ANYTHING) or right_weights(out, source, expected), text
        outcomes.append(is_written)
        shutil.rmtree(place / str(number))
    return outcomes


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where copies are damaged; code in a pickle would make a folder in the current one."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "cases"
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize(
    ("write", "damage"), [(written_deepspeed, damage_deepspeed), (written_megatron, damage_megatron)]
)
def test_some_damaged_checkpoints(tmp_path, place, write, damage):
    outcomes = check_cases(with_weights(write(tmp_path)), damage, NUM_QUICK_CASES, place, seed=0)
    assert sum(outcomes) < NUM_QUICK_CASES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "damage"),
    [
        (written_deepspeed, damage_deepspeed),
        (real_deepspeed, damage_deepspeed),
        (written_megatron, damage_megatron),
    ],
)
def test_damaged_checkpoints(tmp_path, place, write, damage):
    outcomes = check_cases(with_weights(write(tmp_path)), damage, NUM_CASES, place, seed=1)
    assert 10 < sum(outcomes) < NUM_CASES / 2  # some damage is none
