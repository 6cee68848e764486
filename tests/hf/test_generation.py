"""Generation settings survive training, checkpoints and exports; only the cache is off during training."""

import json

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from megalowbit.engine.pipeline.setup import pipeline_module
from megalowbit.hf.checkpoint import build_model, export_checkpoint, import_checkpoint
from megalowbit.hf.generation import FILE, stored_generation
from megalowbit.hf.model import save_hf
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
