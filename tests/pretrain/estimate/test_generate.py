"""`megalowbit generate` writes what a model prepared with the public API writes."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import megalowbit as mlb
from launchers import training_text, write_config
from megalowbit.commands.models.generate import main
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.hf.training_checkpoint import stored_static_inputs
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.generate import generator_of
from megalowbit.pretrain.run import pretrain

PROMPT = training_text()[:12]
GREEDY = {"max_tokens": 16, "temperature": 0.0, "seed": 0}


def trained(folder, **block):
    """A run of a few steps with learning rates that make its model say something."""
    config = write_config(folder, block={"recipe": "nvfp4", "run": {"steps": 6}, **block})
    settings = load_config(config, ["optimizer.params.lr=0.02"], world_size=1)
    pretrain(settings, ProcessIdentity(), run_dir=folder / "run", is_resume=False)
    return folder / "run"


def expected(run, *, recipe=None, static=None):
    """The greedy continuation by transformers, of the run's exported model."""
    block = json.loads((run / "config.json").read_text())["megalowbit"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[block["precision"]]
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32).to(dtype).eval()
    if recipe is not None:
        mlb.convert(model, recipe=recipe)
    if static is not None:
        mlb.use_static_inputs(model, static)
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
        )
    return bytes(output[0, ids.shape[1] :].tolist()).decode("utf-8", errors="replace")


def test_a_run_writes_with_its_recipe_and_recorded_inputs(tmp_path):
    run = trained(tmp_path)
    static = stored_static_inputs(run / "checkpoints" / "step-00000006")
    found = generator_of(run)
    text, count = found.write(PROMPT, **GREEDY)
    assert (text, count) == (expected(run, recipe="nvfp4", static=static), 16)
    assert found.lines[1:] == (
        "recipe    nvfp4",
        "inputs    static: quantised by numbers recorded at the end of training",
    )
    exported = generator_of(run / "hf")
    assert exported.write(PROMPT, **GREEDY)[0] == expected(run, recipe="nvfp4")
    assert exported.lines[1] == "recipe    nvfp4"
    plain = generator_of(run, recipe="bf16")
    assert plain.write(PROMPT, **GREEDY)[0] == expected(run)
    elsewhere = shutil.copytree(run / "hf", tmp_path / "elsewhere")
    assert generator_of(elsewhere).lines[1] == "recipe    none, nothing is rounded: --recipe names one"


def test_after_a_late_switch_nothing_is_rounded_unless_asked_for(tmp_path):
    run = trained(tmp_path, late_switch={"at": 3})
    found = generator_of(run)
    assert found.lines[-1].startswith("forward   rounds nothing, as the run since its late switch")
    assert found.write(PROMPT, **GREEDY)[0] == expected(run)
    rounded = generator_of(run, forward="recipe")
    assert rounded.lines[-1].startswith("inputs    ")
    logits = [each.model(torch.tensor([[1, 2, 3]])).logits for each in (found, rounded)]
    assert not logits[0].equal(logits[1])


def test_sampling_repeats_with_its_seed_and_stops_at_the_models_positions(tmp_path, capsys):
    run = trained(tmp_path)
    writer = generator_of(run)
    first, second, other = (writer.write("", max_tokens=8, temperature=1.0, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert first != other
    positions = writer.model.config.max_position_embeddings
    assert writer.write("a" * (positions - 2), max_tokens=50, temperature=1.0, seed=0)[1] <= 2
    with pytest.raises(UserError, match=f"the prompt has {positions} tokens, and the model {positions} pos"):
        writer.write("a" * positions, max_tokens=1, temperature=1.0, seed=0)
    capsys.readouterr()
    assert main([str(run), "--prompt", PROMPT, "--greedy", "--max-tokens", "16"]) == 0
    printed = capsys.readouterr()
    assert printed.out == PROMPT + writer.write(PROMPT, **GREEDY)[0] + "\n"
    assert printed.err.splitlines()[0].startswith("model     ")
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(UserError, match=r"--tokenizer"):
        generator_of(run, tokenizer="nowhere")
    assert generator_of(run).tokenizer.vocab_size == 256  # the configuration says that it is of bytes
