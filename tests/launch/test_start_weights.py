"""Two ranks start from a Hugging Face folder: what is wrong with it ends both with one line; a resumed run
reads nothing of it.
"""

import shutil
import time

import pytest
import torch
from forked_ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from launchers import metrics, write_config


@pytest.fixture
def folder(tmp_path):
    """A configuration that starts at ZeRO 3 from `hf/`, whose weights are in several files."""
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    block = {
        "model": {"checkpoint": "hf"}, "precision": "bf16", "recipe": "nvfp4", "run": {"steps": 2},
        "checkpoint": {"every": 2, "export_hf": False},
    }  # fmt: skip
    write_config(tmp_path, block=block, zero_optimization={"stage": 3})
    return tmp_path


def launch(folder, *arguments):
    config = ("--ds-config", folder / "tiny.json", "--run-dir", folder / "run")
    began = time.monotonic()
    done = run_ranks(*config, *arguments, cwd=folder, processes=2)
    assert time.monotonic() - began < 120
    return done


def put_nan(folder):
    path = sorted(folder.glob("*.safetensors"))[-1]
    content = load_file(path)
    content[sorted(content)[0]].view(-1)[7] = float("nan")
    save_file(content, path, metadata={"format": "pt"})


def truncate(folder):
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-100])


def remove(folder):
    sorted(folder.glob("*.safetensors"))[0].unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put_nan, "values that are NaN or infinite"),
        pytest.param(truncate, "cannot be loaded", marks=pytest.mark.slow),
        pytest.param(remove, "which does not exist: complete the folder", marks=pytest.mark.slow),
    ],
)
def test_damaged_weights_end_both_ranks_with_one_line(folder, damage, message):
    damage(folder / "hf")
    done = launch(folder)
    assert done.code == 2, done.output
    assert len(done.errors) == 1, done.output
    assert message in done.errors[0]
    assert "Traceback" not in done.output


def test_a_resumed_run_reads_no_initial_weights(folder):
    done = launch(folder)
    assert done.code == 0, done.output
    for path in (folder / "hf").glob("*.safetensors"):
        path.write_bytes(b"damaged")
    done = launch(folder, "--resume", "auto", "--set", "megalowbit.run.steps=3")
    assert done.code == 0, done.output
    assert [row["step"] for row in metrics(folder / "run")] == [1, 2, 3]
    shutil.rmtree(folder / "run")
    done = launch(folder, "--resume", "auto")  # there is no checkpoint: the weights are needed
    assert done.code == 2
    assert len(done.errors) == 1
