"""Generation settings survive training, checkpoints and exports; only the cache is off during training."""

import json
import os
from pathlib import Path

import pytest
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from megalowbit.engine.pipeline.setup import pipeline_module
from megalowbit.hf.checkpoint import build_model, export_checkpoint, import_checkpoint
from megalowbit.hf.generation import FILE, stored_generation
from megalowbit.hf.model import save_hf
from megalowbit.hf.packed.export import export_packed_checkpoint, export_packed_model, plan_packed_folder
from megalowbit.hf.settings import ModelSettings
from megalowbit.layers.conversion.convert import convert

SIZES = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
OF_THE_FILE = ("transformers_version", "_from_model_config")


def source(folder, *, use_cache=True, **generation):
    model = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0, use_cache=use_cache))
    model.save_pretrained(folder)
    path = folder / FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_cache": use_cache, **generation}))
    return folder


def facts(folder):
    config, generation = (json.loads((folder / name).read_text()) for name in ("config.json", FILE))
    return config["use_cache"], {name: value for name, value in generation.items() if name not in OF_THE_FILE}


CASES = [
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 3], "max_new_tokens": 7},
    {"use_cache": False},
    {"do_sample": False, "temperature": 0.6},  # which transformers refuses to save
]


@pytest.mark.parametrize("generation", CASES)
def test_an_export_keeps_the_generation_values_of_the_original(tmp_path, generation):
    expected = facts(source(tmp_path / "hf", **generation))
    model = build_model(ModelSettings(checkpoint=tmp_path / "hf"), seed=0)
    assert model.config.use_cache is False
    convert(model, "nvfp4")
    save_hf(model, tmp_path / "out")
    assert facts(tmp_path / "out") == expected
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("generation", [CASES[0], CASES[2]])
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_all_files_of_an_export_have_the_permissions_of_the_umask(tmp_path, generation, mask, mode):
    source(tmp_path / "hf", **generation)
    model = build_model(ModelSettings(checkpoint=tmp_path / "hf"), seed=0)
    before = os.umask(mask)
    try:
        save_hf(model, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {mode}, modes


@pytest.mark.parametrize("generation", CASES)
def test_generation_values_survive_our_checkpoints(tmp_path, generation):
    expected = facts(source(tmp_path / "hf", **generation))
    import_checkpoint(tmp_path / "hf", tmp_path / "start")
    export_checkpoint(tmp_path / "start", tmp_path / "back")
    assert facts(tmp_path / "back") == expected
    model = build_model(ModelSettings(checkpoint=tmp_path / "start"), seed=0)
    assert model.config.use_cache is False
    save_hf(model, tmp_path / "out")
    assert facts(tmp_path / "out") == expected


@pytest.mark.parametrize("generation", CASES)
def test_a_converted_model_that_was_not_trained_keeps_its_values(tmp_path, generation):
    expected = facts(source(tmp_path / "hf", **generation))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    convert(model, "nvfp4")
    save_hf(model, tmp_path / "out")
    assert facts(tmp_path / "out") == expected


def test_packed_folders_keep_the_values(tmp_path):
    llama = tiny_model("llama", vocab_size=64)
    llama.save_pretrained(tmp_path / "hf")
    values = {**json.loads((tmp_path / "hf" / FILE).read_text()), **CASES[0]}
    (tmp_path / "hf" / FILE).write_text(json.dumps(values))
    expected = facts(tmp_path / "hf")
    plan_packed_folder(tmp_path / "hf", "nvfp4", "modelopt").run(tmp_path / "quantized")
    assert facts(tmp_path / "quantized") == expected
    import_checkpoint(tmp_path / "hf", tmp_path / "start", "nvfp4")
    export_packed_checkpoint(tmp_path / "start", tmp_path / "exported", "modelopt")
    assert facts(tmp_path / "exported") == expected
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    convert(model, "nvfp4")
    export_packed_model(model, tmp_path / "of-model", "modelopt")
    assert facts(tmp_path / "of-model") == expected


@pytest.mark.parametrize(
    ("tokenizer_end", "expected"),
    [(2, {"bos_token_id": 1, "eos_token_id": [2, 9]}), (5, {"bos_token_id": 5, "eos_token_id": 5})],
)
def test_a_tokenizer_replaces_only_the_end_tokens_of_another_one(tmp_path, tokenizer_end, expected):
    model = tiny_model("llama", vocab_size=64)
    for settings in (model.config, model.generation_config):
        settings.bos_token_id, settings.eos_token_id = 1, [2, 9]
    model.save_pretrained(tmp_path / "hf")

    class Tokenizer:
        eos_token_id = tokenizer_end

        def save_pretrained(self, folder):
            (Path(folder) / "tokenizer.json").write_text("{}")

    model = build_model(ModelSettings(checkpoint=tmp_path / "hf"), seed=0)
    save_hf(model, tmp_path / "out", Tokenizer())
    for name in ("config.json", FILE):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert {key: written[key] for key in expected} == expected


def test_pipeline_stages_keep_the_generation_values(tmp_path):
    model = build_model(ModelSettings(checkpoint=source(tmp_path / "hf", **CASES[0])), seed=0)
    expected = stored_generation(model)
    assert expected["generation_config"]["temperature"] == 0.6
    assert stored_generation(pipeline_module(model, num_stages=1)) == expected


def test_a_random_model_is_exported_with_the_cache_on(tmp_path):
    GPT2Config(**SIZES).save_pretrained(tmp_path)
    model = build_model(ModelSettings(config=tmp_path / "config.json"), seed=0)
    save_hf(model, tmp_path / "out")
    assert facts(tmp_path / "out")[0] is True
    assert facts(tmp_path / "out")[1]["use_cache"] is True
