"""launch/pretrain.py as users start it, under each launcher; the other tests of runs fork their ranks."""

import subprocess

import pytest
import torch
from forked_ranks import run_ranks
from quick_cases import slow_except
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from launchers import ROOT, kill, metrics, run, start, wait_for_step, write_config

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.json"))
FINETUNED = {
    "finetune_gpt2": GPT2Config(vocab_size=50257, n_positions=2048, n_embd=32, n_layer=2, n_head=2),
    "finetune_llama": LlamaConfig(
        vocab_size=128256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8192,
    ),
}


@pytest.mark.parametrize("launcher", slow_except(["deepspeed"], ["deepspeed", "torchrun", "python"]))
def test_every_launcher_starts_the_same_script(launcher, tmp_path):
    config = write_config(tmp_path, block={"precision": "fp32", "run": {"steps": 2}})
    done = run(launcher, "--ds-config", config, cwd=tmp_path)
    assert done.code == 0, done.output
    assert len(metrics(tmp_path / "runs" / "tiny")) == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of one run with dropout on two ranks; resumed runs compare with it."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder, block={"run": {"steps": 24}, "checkpoint": {"every": 6, "keep": None}})
    done = run("deepspeed", "--ds-config", config, "--run-dir", folder / "run", cwd=folder, processes=2)
    assert done.code == 0, done.output
    assert "\x1b" not in done.output
    assert "before it has started" not in done.output  # a false alarm of DeepSpeed
    return folder


@pytest.mark.slow
def test_a_killed_run_resumes_with_bitwise_equal_losses(finished, tmp_path):
    folder = finished
    arguments = ("--ds-config", folder / "tiny.json", "--run-dir", tmp_path / "run", "--resume", "auto")
    process = start("deepspeed", *arguments, cwd=folder, processes=2)
    wait_for_step(tmp_path / "run", 8, process)
    kill(process)
    before = metrics(tmp_path / "run")
    assert len(before) < 24
    done = run_ranks(*arguments, cwd=folder, processes=2)
    assert done.code == 0, done.output
    assert "resumed after step" in done.output
    keys = ("step", "loss", "lr", "grad_norm", "loss_scale", "gradient_overflow/total_overflow_elements")
    undisturbed = [[row[key] for key in keys] for row in metrics(folder / "run")]
    assert [[row[key] for key in keys] for row in metrics(tmp_path / "run")] == undisturbed
    again = run_ranks(*arguments, cwd=folder, processes=2)
    assert again.code == 0
    assert "nothing left to do" in again.output


@pytest.mark.slow
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(finished, tmp_path):
    folder = finished
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", folder / "run", copy], check=True)
    weights = copy / "checkpoints" / "step-00000024" / "mp_rank_00_model_states.pt"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 0xFF
    weights.write_bytes(content)
    arguments = ("--ds-config", folder / "tiny.json", "--run-dir", copy, "--resume", "auto")
    done = run_ranks(*arguments, cwd=folder, processes=2)
    assert done.code == 0, done.output
    (line,) = [line for line in done.output.splitlines() if "damaged" in line]
    assert "step-00000024 is damaged: mp_rank_00_model_states.pt" in line
    assert "moved to step-00000024.damaged" in line
    assert "resumed after step 18" in done.output
    assert (copy / "checkpoints" / "step-00000024.damaged" / weights.name).read_bytes() == bytes(content)
    assert weights.is_file()  # of the step as it was saved again
    losses = [[(row["step"], row["loss"]) for row in metrics(each)] for each in (copy, folder / "run")]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_mistake_on_two_ranks_is_one_line_and_exit_code_2(tmp_path):
    config = write_config(tmp_path)
    done = run(
        "deepspeed", "--ds-config", config, "--set", "megalowbit.recipe=nvpf4", cwd=tmp_path, processes=2
    )
    assert done.code == 2, done.output
    assert len(done.errors) == 1
    assert "did you mean 'nvfp4'" in done.errors[0]
    assert "Traceback" not in done.output


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_configuration_passes_a_dry_run(name, tmp_path):
    config = ROOT / "configs" / f"{name}.json"
    changes = []
    if name in FINETUNED:  # the user names a folder of this architecture
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(FINETUNED[name])
        model.to_empty(device="cpu").save_pretrained(tmp_path / "source")
        named = {"model.checkpoint": tmp_path / "source", "data.tokenizer": "byte"}
        changes = [part for key, value in named.items() for part in ("--set", f"megalowbit.{key}={value}")]
    done = run_ranks("--ds-config", config, "--dry-run", *changes, cwd=tmp_path)
    assert done.code == 0, done.output
