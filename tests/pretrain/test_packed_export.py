"""From training to a served model: train, export packed, load in transformers, generate the same tokens."""

import json
import math
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from launchers import ROOT, metrics, write_config
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.hf.checkpoint import export_checkpoint
from megalowbit.hf.packed.export import export_packed_checkpoint
from megalowbit.hf.training_checkpoint import read_checkpoint
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.run import pretrain
from megalowbit.quantize.names import quantizer

if sys.version_info < (3, 11):
    pytest.skip("compressed-tensors needs Python 3.11", allow_module_level=True)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def train(folder, recipe, **precision):
    path = write_config(folder, **precision)
    (folder / "model.json").write_text(json.dumps(LLAMA))
    settings = [f"megalowbit.recipe={recipe}", "megalowbit.run.steps=12"]
    settings.append('megalowbit.late_switch={"at": 10, "scope": "forward"}')
    config = load_config(path, settings, world_size=1)
    pretrain(config, ProcessIdentity(), run_dir=folder / "run", is_resume=False)
    return folder / "run"


def emulated(run, folder):
    """The run's model as a server computes it: bf16, low-bit weights as in the forward, inputs unrounded."""
    export_checkpoint(run, folder, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    stored = read_checkpoint(run)
    converted = AutoModelForCausalLM.from_config(model.config)
    convert(converted, stored.recipe)
    with torch.no_grad():
        for name, layer in bit_layers(converted).items():
            weight = stored.half_state_dict[f"{name}.weight"]
            model.get_submodule(name).weight.copy_(quantizer(layer.recipe.q_forward_weight)(weight))
    return model


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        ("nvfp4", {"bf16": {"enabled": True}}),
        pytest.param("nvidia-nvfp4", {}, marks=pytest.mark.slow),
        pytest.param("mxfp4", {"bf16": {"enabled": True}}, marks=pytest.mark.slow),
    ],
)
def test_a_trained_model_is_served_with_the_weights_of_its_forward(tmp_path, recipe, precision):
    run = train(tmp_path, recipe, **precision)
    report = export_packed_checkpoint(run, tmp_path / "packed", "compressed-tensors", is_exact=True)
    assert not report.rounded
    note = "the late switch of the run ended the rounding in the forward"
    assert note in str(report)
    assert f"Note: {note}" in (tmp_path / "packed" / "README.md").read_text()
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    reference = emulated(run, tmp_path / "plain")
    prompt = torch.tensor([list(b"the baker counts")])
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    tokens = served.generate(prompt, **options, eos_token_id=None)
    assert tokens.shape == (1, 80)
    assert tokens.equal(reference.generate(prompt, **options, eos_token_id=None))
    with torch.no_grad():
        assert served(tokens).logits.equal(reference(tokens).logits)
    for name, parameter in reference.named_parameters():
        assert served.get_parameter(name).equal(parameter)


def test_a_folder_is_finetuned_with_the_shipped_configuration_and_served(tmp_path):
    """Weights, tokens and losses: the run begins with the folder, and the packed export is its result."""
    write_config(tmp_path)  # for its text
    tiny = tiny_model("llama", vocab_size=256, intermediate_size=96, hidden_size=64, positions=64)
    tiny.save_pretrained(tmp_path / "hf")
    settings = {
        "megalowbit.model.checkpoint": tmp_path / "hf",
        "megalowbit.data.tokenizer": "byte",
        "megalowbit.data.corpus": tmp_path / "text.txt",
        "megalowbit.data.corpus_config": "null",
        "megalowbit.data.sequence_length": 32,
        "megalowbit.data.cache_dir": tmp_path / "cache",
        "megalowbit.run.steps": 10,
        "megalowbit.lr_schedule.warmup_steps": 2,
        "optimizer.params.lr": 3e-3,
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization.stage": 0,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(ROOT / "configs" / "finetune_llama.json", overrides, world_size=1)
    run = tmp_path / "run"
    pretrain(config, ProcessIdentity(), run_dir=run, is_resume=False)
    losses = [row["loss"] for row in metrics(run)]
    ids = torch.tensor([list((tmp_path / "text.txt").read_bytes()[:32])])
    with torch.no_grad():
        assert abs(tiny(ids, labels=ids).loss.item() - losses[0]) < 0.2
    assert losses[-1] < losses[0] - 0.3
    finetuned = AutoModelForCausalLM.from_pretrained(run / "hf")
    for name, parameter in tiny.named_parameters():  # all weights are trained
        assert not finetuned.get_parameter(name).float().equal(parameter.detach().bfloat16().float()), name
    report = export_packed_checkpoint(run, tmp_path / "packed", "compressed-tensors")
    assert report.notes == ()
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    reference = emulated(run, tmp_path / "plain")
    with torch.no_grad():
        assert served(ids).logits.equal(reference(ids).logits)


def test_servers_round_inputs_with_the_range_that_the_run_has_recorded(tmp_path):
    run = train(tmp_path, "nvfp4", bf16={"enabled": True})
    maxima = read_checkpoint(run).static_inputs.maxima
    export_packed_checkpoint(run, tmp_path / "packed", "compressed-tensors", precision="w4a4")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    assert len(maxima) == 14
    for layer, largest in maxima.items():
        # NVFP4 reaches 6 × 448; the scale is rounded up to a power of two
        expected = 2.0 ** -math.ceil(math.log2(largest / 2688))
        assert tensors[f"{layer}.input_global_scale"].item() == expected
