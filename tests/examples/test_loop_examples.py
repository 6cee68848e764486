"""The examples for loops of other libraries, run as their users run them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from environments import environment_with
from forks import run_script
from quick_cases import slow_except
from transformers import AutoModelForCausalLM

import megalowbit as mlb

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LIGHTNING = "lightning==2.6.6"
OF_LIBRARIES = ("hf_trainer.py", "accelerate_loop.py", "deepspeed_script.py", "lightning_module.py")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment():
    kept = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    kept |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return kept | {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}


def run(name, *arguments, python=None, processes=1):
    """What the example printed."""
    if python is None and processes == 1:
        done = run_script(EXAMPLES / name, *map(str, arguments), env=environment())
    else:
        start = [python or sys.executable]
        if processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [*start, str(EXAMPLES / name), *map(str, arguments)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(printed):
    return [float(each) for each in re.findall(r"loss'?:? '?([\d.]+)", printed)]


def has_learned(printed, steps):
    seen = losses(printed)
    assert len(seen) >= steps
    assert seen[0] > 5.3  # ln 256 = 5.5
    assert min(seen[-4:]) < 5.0


def plain_weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert mlb.bit_layers(model) == {}
    return model.state_dict()


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_an_example_has_at_most_sixty_lines(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 60


def test_trainer_learns_and_a_resumed_run_ends_with_the_same_bits(tmp_path):
    arguments = ("--out", tmp_path, "--steps", 11)
    has_learned(run("hf_trainer.py", *arguments), 11)
    expected = plain_weights(tmp_path / "final")
    for each in ("checkpoint-11", "final"):
        shutil.rmtree(tmp_path / each)
    assert len(losses(run("hf_trainer.py", *arguments, "--resume"))) < 4  # it continues after step 10
    weights = plain_weights(tmp_path / "final")
    assert [name for name, value in weights.items() if not torch.equal(value, expected[name])] == []


RUNS = [("accelerate_loop.py", 1), ("accelerate_loop.py", 2), ("hf_trainer.py", 2)]


@pytest.mark.parametrize(("name", "processes"), slow_except([("accelerate_loop.py", 1)], RUNS))
def test_a_loop_learns_and_saves_a_plain_model(tmp_path, name, processes):
    has_learned(run(name, "--out", tmp_path, "--steps", 12, processes=processes), 12)
    saved = plain_weights(tmp_path / ("final" if name == "hf_trainer.py" else "model"))
    assert all(torch.isfinite(value).all() for value in saved.values())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stock_deepspeed_script_learns_in_low_precision(tmp_path, processes):
    config = ROOT / "configs" / "gpt2_tiny_fp4.json"
    arguments = ("--out", tmp_path, "--steps", 12, "--deepspeed_config", config)
    printed = run("deepspeed_script.py", *arguments, processes=processes)
    has_learned(printed, 12)
    assert (tmp_path / "latest").is_file()


@pytest.mark.slow
def test_lightning_learns_and_saves_a_plain_model(tmp_path):
    python = environment_with(tmp_path, LIGHTNING) / "bin" / "python"
    printed = run("lightning_module.py", "--out", tmp_path, "--steps", 12, python=str(python))
    assert losses(printed)[-1] < 4.8
    assert plain_weights(tmp_path / "model")
