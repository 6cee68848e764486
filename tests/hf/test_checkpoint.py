import functools
import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import KINDS, tiny_model
from transformers import AutoModelForCausalLM, GPT2Config

from megalowbit.errors import UserError
from megalowbit.hf.checkpoint import build_model, export_checkpoint, import_checkpoint, read_config
from megalowbit.hf.settings import ModelSettings
from megalowbit.hf.training_checkpoint import HEADER_FILE, read_checkpoint
from megalowbit.layers.conversion.convert import bit_layers, convert, restore
from megalowbit.layers.recipe import recipe

SIZES = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = GPT2Config(n_positions=32, n_embd=32, n_layer=2, n_head=2, **SIZES)
MODELS = {
    **{kind: functools.partial(tiny_model, kind) for kind in KINDS},
    "gpt2_untied": lambda: tiny_model("gpt2", tie_word_embeddings=False),
    "llama_tied": lambda: tiny_model("llama", tie_word_embeddings=True),
}
TOKENS = torch.arange(20).reshape(2, 10) * 7 % 64


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def hf_folder(folder, name="gpt2", dtype=torch.float32):
    model = MODELS[name]().to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_from_hugging_face_and_back_gives_the_same_logits(tmp_path, name, dtype):
    hf_folder(tmp_path / "source", name, dtype)
    # Loaded again: casting a whole model also rounds the frequencies of LLaMA's positions, loading does not.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype="auto")
    import_checkpoint(tmp_path / "source", tmp_path / "start")
    assert read_checkpoint(tmp_path / "start").recipe == recipe("nvfp4-first-block-fp8")
    export_checkpoint(tmp_path / "start", tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert back.dtype == dtype
    assert logits(back).equal(logits(model))
    is_tied = back.get_output_embeddings().weight is back.get_input_embeddings().weight
    assert is_tied == (name in ("gpt2", "llama_tied"))


@pytest.mark.parametrize("name", MODELS)
def test_both_kinds_of_folder_give_the_same_model(tmp_path, name):
    expected = logits(hf_folder(tmp_path / "source", name))
    import_checkpoint(tmp_path / "source", tmp_path / "start", "nvfp4")
    for folder in (tmp_path / "source", tmp_path / "start", tmp_path / "start" / "step-00000000"):
        model = build_model(ModelSettings(checkpoint=folder), seed=0)
        assert model.training
        assert not bit_layers(model)
        assert model.config.use_cache is False
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert logits(model).equal(expected)


def test_a_configuration_gives_random_weights_by_seed(tmp_path):
    GPT2.save_pretrained(tmp_path)
    settings = ModelSettings(config=tmp_path / "config.json", overrides={"n_layer": 1, "resid_pdrop": 0.0})
    first, again, other = (build_model(settings, seed=seed) for seed in (1, 1, 2))
    assert (len(first.transformer.h), first.config.resid_pdrop) == (1, 0.0)
    assert logits(first).equal(logits(again))
    assert not logits(first).equal(logits(other))


def test_the_stored_dtype_of_a_configuration_does_not_lower_the_precision(tmp_path):
    config = {**GPT2.to_dict(), "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_model(ModelSettings(config=tmp_path / "config.json"), seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_dry_run_costs_no_memory(tmp_path):
    hf_folder(tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "start")
    for folder in (tmp_path / "source", tmp_path / "start"):
        model = build_model(ModelSettings(checkpoint=folder), seed=0, device="meta")
        assert {p.device.type for p in model.parameters()} == {"meta"}


def test_overrides_reach_a_checkpoint_too(tmp_path):
    hf_folder(tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "start")
    for folder in (tmp_path / "source", tmp_path / "start"):
        settings = ModelSettings(checkpoint=folder, overrides={"attn_pdrop": 0.0})
        assert read_config(settings).attn_pdrop == build_model(settings, seed=0).config.attn_pdrop == 0.0
        settings = ModelSettings(checkpoint=folder, overrides={"n_layer": 3})
        with pytest.raises(UserError, match="lacks the weight"):
            build_model(settings, seed=0)


def test_the_dtype_of_an_export_can_be_chosen(tmp_path):
    hf_folder(tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "start")
    export_checkpoint(tmp_path / "start", tmp_path / "half", torch.float16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.float16


def test_an_export_refuses_a_dtype_that_would_make_weights_infinite(tmp_path):
    """65519 still rounds to 65504, the largest number of fp16."""
    model = MODELS["llama"]()
    for name, value in (("fits", -65519.0), ("large", -65520.0)):
        model.model.norm.weight.data[3] = value
        model.save_pretrained(tmp_path / name)
        import_checkpoint(tmp_path / name, tmp_path / f"{name}_start")
    export_checkpoint(tmp_path / "fits_start", tmp_path / "fits_half", torch.float16)
    assert load_file(tmp_path / "fits_half" / "model.safetensors")["model.norm.weight"][3] == -65504
    with pytest.raises(UserError, match=r"large_start: weight model\.norm\.weight has values up to 65520, "):
        export_checkpoint(tmp_path / "large_start", tmp_path / "large_half", torch.float16)
    assert not (tmp_path / "large_half").exists()
    export_checkpoint(tmp_path / "large_start", tmp_path / "large_bf16", torch.bfloat16)


def test_a_training_checkpoint_is_exported_unchanged(tmp_path):
    """The engine's file holds much beside the weights, and the weights are in half precision."""
    source = tmp_path / "source"
    hf_folder(source, "llama_tied")
    model = build_model(ModelSettings(checkpoint=source), seed=0)
    report = convert(model, "nvfp4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    model.to(torch.bfloat16)
    ours = {"format": 1, "step": 2, "hf_config": model.config.to_dict(), "recipe": report.recipe.to_dict()}
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    content = {
        "module": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": None,
        "ds_config": {"train_batch_size": 2},
        "megalowbit": {**ours, "config": {}},
    }
    torch.save(content, step / HEADER_FILE)
    data = (step / HEADER_FILE).read_bytes()
    facts = {"name": HEADER_FILE, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (step / "manifest.json").write_text(json.dumps({"format": 1, "files": [facts]}))
    (step.parent / "latest").write_text(step.name)

    export_checkpoint(tmp_path / "run", tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert exported.dtype == torch.bfloat16
    restore(model)
    assert exported.state_dict().keys() == model.state_dict().keys()
    assert all(value.equal(exported.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not a folder: name a Hugging Face folder"),
        (lambda folder: folder.mkdir(), r"has no config\.json and contains no training checkpoint"),
    ],
)
def test_a_folder_that_is_neither_kind_is_refused(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(UserError, match=message):
        build_model(ModelSettings(checkpoint=tmp_path / "x"), seed=0)
    with pytest.raises(UserError, match=message):
        import_checkpoint(tmp_path / "x", tmp_path / "out")
    with pytest.raises(UserError, match="no complete training checkpoint"):
        export_checkpoint(tmp_path / "x", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_neither_direction_overwrites_a_folder(tmp_path):
    hf_folder(tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "start")
    with pytest.raises(UserError, match="source already exists"):
        export_checkpoint(tmp_path / "start", tmp_path / "source")
    with pytest.raises(UserError, match="start already exists"):
        import_checkpoint(tmp_path / "source", tmp_path / "start")
    with pytest.raises(UserError, match="is already a training checkpoint"):
        import_checkpoint(tmp_path / "start", tmp_path / "again")


def test_an_unknown_recipe_is_refused_and_leaves_nothing(tmp_path):
    hf_folder(tmp_path / "source")
    with pytest.raises(UserError, match="unknown recipe 'nvfp5'"):
        import_checkpoint(tmp_path / "source", tmp_path / "start", "nvfp5")
    assert not (tmp_path / "start").exists()


def test_only_cpu_and_meta_are_built_on(tmp_path):
    GPT2.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="device must be cpu or meta: 'cuda'"):
        build_model(ModelSettings(config=tmp_path / "config.json"), seed=0, device="cuda")
