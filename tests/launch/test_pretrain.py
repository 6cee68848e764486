"""The main job end to end on forked ranks: files, records, export, mistakes; launchers: test_launchers.py."""

import json
import math
import subprocess
import sys

import pytest
import torch
from forked_ranks import run_ranks
from forks import run_script
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from launchers import ROOT, metrics, write_config

STEP_KEYS = {
    "step",
    "loss",
    "lr",
    "grad_norm",
    "loss_scale",
    "skipped_steps",
    "tokens_per_second",
    "tflops_per_device",
    "gradient_overflow/element_overflow_rate",
    "gradient_overflow/batch_overflow_rate",
    "gradient_overflow/total_overflow_elements",
    "gradient_overflow/total_elements",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder and output of one run with dropout on two ranks."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder, block={"run": {"steps": 12}, "checkpoint": {"every": 6, "keep": None}})
    arguments = ("--ds-config", config, "--run-dir", folder / "run", "--set", "wandb.enabled=true")
    done = run_ranks(*arguments, cwd=folder, processes=2)
    assert done.code == 0, done.output
    return folder, done.output


def test_a_run_leaves_every_record_in_its_folder(finished):
    run_dir = finished[0] / "run"
    names = {path.name for path in run_dir.iterdir()}
    assert {
        "config.json", "metrics.jsonl", "overflow_layers.jsonl", "tensorboard", "wandb", "checkpoints", "hf",
        "summary.json",
    } <= names  # fmt: skip
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(row.keys() >= STEP_KEYS for row in rows)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir() if p.is_dir()) == [
        "step-00000006",
        "step-00000012",
    ]
    assert list((run_dir / "wandb").rglob("*.wandb"))


def test_the_log_shows_progress_and_ends_with_a_summary(finished):
    output = finished[1]
    assert "\x1b" not in output
    assert "before it has started" not in output  # a false alarm of DeepSpeed
    assert "7 layers converted" in output
    for heading in ("loss", "lr", "grad_norm", "scale", "skips", "saturated", "tok/s", "ETA"):
        assert heading in output
    assert "12/12" in output
    assert "Summary" in output


def test_overflow_counts_in_the_records_add_up(finished):
    run_dir = finished[0] / "run"
    rows = metrics(run_dir)
    # 2 ranks × 2 micro-batches × 2 sequences × 32 tokens; the outputs of c_proj, c_fc, mlp.c_proj in both
    # blocks, and of c_attn in the second
    elements_a_step = 2 * 2 * 2 * 32 * (2 * (32 + 128 + 32) + 96)
    assert [row["gradient_overflow/total_elements"] for row in rows] == [
        elements_a_step * step for step in range(1, 13)
    ]
    total = sum(row["gradient_overflow/element_overflow_rate"] * elements_a_step for row in rows)
    assert rows[-1]["gradient_overflow/total_overflow_elements"] == pytest.approx(total)
    assert 0 < rows[-1]["gradient_overflow/element_overflow_rate"] < 0.2
    table = [json.loads(line) for line in (run_dir / "overflow_layers.jsonl").read_text().splitlines()]
    assert {(row["layer"], row["role"]) for row in table} == {
        (f"transformer.h.{block}.{name}", role)
        for block in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        for role in ("input", "weight", "grad_output")
        if (block, name) != (0, "attn.c_attn")
    }
    gradients = sum(row["elements"] for row in table if row["role"] == "grad_output")
    assert gradients == elements_a_step * 12


def test_tensorboard_holds_the_documented_tags(finished):
    run_dir = finished[0] / "run"
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= STEP_KEYS - {"step"}
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert losses == pytest.approx({row["step"]: row["loss"] for row in metrics(run_dir)})


def test_the_exported_model_is_an_ordinary_hf_checkpoint_with_the_trained_weights(finished):
    run_dir = finished[0] / "run"
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    ids = tokenizer("def f(x):\n", return_tensors="pt").input_ids
    assert ids.tolist() == [list(b"def f(x):\n")]
    state = torch.load(
        run_dir / "checkpoints" / "step-00000012" / "mp_rank_00_model_states.pt", weights_only=False
    )["module"]
    fc = state["transformer.h.0.mlp.c_fc.weight"]
    assert torch.equal(model.transformer.h[0].mlp.c_fc.weight.float(), fc.t().float())
    assert type(model.transformer.h[0].mlp.c_fc).__name__ == "Conv1D"
    assert torch.isfinite(model(ids).logits).all()


def test_a_checkpoint_of_the_run_exports_to_the_same_model_with_its_tokenizer(finished, tmp_path):
    run_dir, exported = finished[0] / "run", tmp_path / "exported"
    done = run_script(ROOT / "tools" / "convert_hf.py", "to-hf", run_dir, exported)
    assert done.returncode == 0, done.stderr
    assert (exported / "tokenizer.json").read_bytes() == (run_dir / "hf" / "tokenizer.json").read_bytes()
    found, expected = (load_file(folder / "model.safetensors") for folder in (exported, run_dir / "hf"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].equal(value)
    assert AutoTokenizer.from_pretrained(exported)("x = 1").input_ids == list(b"x = 1")
    card = (run_dir / "hf" / "README.md").read_text()
    assert card == (exported / "README.md").read_text()
    assert "| steps | 12 |" in card


@pytest.mark.slow
def test_llama_trains_in_fp16_with_a_dynamic_scale(tmp_path):
    config = write_config(
        tmp_path,
        fp16={"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1},
    )
    llama = {
        "model_type": "llama",
        "vocab_size": 256,
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (tmp_path / "model.json").write_text(json.dumps(llama))
    done = run_ranks("--ds-config", config, cwd=tmp_path)
    assert done.code == 0, done.output
    rows = metrics(tmp_path / "runs" / "tiny")
    # by DeepSpeed's rule, as the block is DeepSpeed's: the first growth comes one clean step later
    assert [row["loss_scale"] for row in rows] == [1024, 1024, 1024, 2048, 2048, 4096]
    assert "14 layers converted" in done.output


@pytest.mark.slow
def test_the_bf16_recipe_runs_next_to_it_without_overflow_figures(tmp_path):
    config = write_config(tmp_path)
    done = run_ranks("--ds-config", config, "--set", "megalowbit.recipe=bf16", cwd=tmp_path)
    assert done.code == 0, done.output
    rows = metrics(tmp_path / "runs" / "tiny")
    assert len(rows) == 6
    assert not any(key.startswith("gradient_overflow") for key in rows[0])


@pytest.mark.slow
def test_a_second_run_never_touches_the_first(tmp_path):
    config = write_config(tmp_path, block={"run": {"steps": 2}, "checkpoint": {"export_hf": False}})
    for _ in range(2):
        assert run_ranks("--ds-config", config, cwd=tmp_path).code == 0
    assert len(metrics(tmp_path / "runs" / "tiny")) == 2
    assert len(metrics(tmp_path / "runs" / "tiny-2")) == 2
    refused = run_ranks("--ds-config", config, "--run-dir", "runs/tiny", cwd=tmp_path)
    assert refused.code == 2
    assert len(refused.errors) == 1
    assert "runs/tiny is not empty: continue it with --resume auto" in refused.errors[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "megalowbit.data.sequence_length=100000"], "sequence"),
        (["--set", "megalowbit.data.corpus=missing.txt"], "missing.txt"),
        (["--set", "megalowbit.model.config=missing.json"], "missing.json"),
        (["--set", "megalowbit.data.sequence_length=65"], "n_positions"),
        (["--set", "optimizer.type=AdamV"], "did you mean"),
        (["--no-such-option"], "--no-such-option"),
        (["--set", "megalowbit.recipe=nvpf4"], "did you mean 'nvfp4'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    config = write_config(tmp_path)
    processes = 2 if "nvfp4" in message else 1  # one line of all ranks
    done = run_ranks("--ds-config", config, *arguments, cwd=tmp_path, processes=processes)
    assert done.code == 2, done.output
    assert len(done.errors) == 1, done.output
    assert message in done.errors[0]
    assert "Traceback" not in done.output
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_a_dry_run_prints_everything_and_writes_nothing(tmp_path):
    config = write_config(tmp_path)
    (tmp_path / "cache").mkdir(mode=0o700)  # compiled kernels of earlier launches may be put there
    before = sorted(tmp_path.iterdir())
    done = run_ranks("--ds-config", config, "--dry-run", cwd=tmp_path)
    assert done.code == 0, done.output
    for part in (
        '"train_batch_size": 4',
        "attn.c_attn",
        "parameters",
        "saved for backward",
        "GiB",
        "lm_head",
    ):
        assert part in done.output
    assert sorted(tmp_path.iterdir()) == before


def test_help_is_quick_and_imports_no_torch():
    code = (
        "import sys; from megalowbit.pretrain.command_line import build_parser; build_parser().format_help()"
    )
    check = "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code + check], cwd=ROOT).returncode == 0
