"""Models that get their weights later against `build_model`: weights, configuration, errors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from start_checkpoints import write_start_checkpoint
from tiny_models import tiny_config, tiny_model

from megalowbit.errors import UserError
from megalowbit.families.outliers import OutlierSettings
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.generation import stored_generation
from megalowbit.hf.settings import ModelSettings
from megalowbit.hf.start.weights import start_model

CHANGES = (
    {},
    {"pad_vocab_to_multiple_of": 48},
    {"pad_vocab_to_multiple_of": 48, "outliers": OutlierSettings(where="embedding", channels=2)},
    {"outliers": OutlierSettings(channels=3)},
)


def check(settings):
    """Compare everything that a run takes from the model."""
    expected = build_model(settings, seed=7)
    model, weights = start_model(settings, seed=7)
    assert all(parameter.is_meta for parameter in model.parameters())
    values = dict(expected.named_parameters())
    opened = weights.open()
    assert set(opened) == values.keys() == weights.shapes.keys()
    for name in opened:
        found = opened[name]
        assert found.dtype == torch.float32
        assert torch.equal(found, values[name]), name
        assert weights.shapes[name] == tuple(found.shape) == tuple(model.get_parameter(name).shape)
    assert model.config.to_dict() == expected.config.to_dict()
    assert stored_generation(model) == stored_generation(expected)
    assert (model.training, model.loss_type) == (expected.training, expected.loss_type)
    for (name, buffer), (same, value) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert (name, buffer.dtype) == (same, value.dtype)
        assert torch.equal(buffer, value)


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_random_weights_are_those_of_a_model_that_is_built_at_once(tmp_path, kind, changes):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(kind, vocab_size=50).to_dict()))
    check(ModelSettings(config=tmp_path / "config.json", **changes))


@pytest.mark.parametrize("changes", [CHANGES[0], CHANGES[2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_of_a_folder_are_those_of_a_model_that_is_loaded_at_once(tmp_path, kind, dtype, changes):
    model = tiny_model(kind, vocab_size=50).to(dtype)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    check(ModelSettings(checkpoint=tmp_path / "hf", **changes))


@pytest.mark.parametrize("changes", [CHANGES[0], CHANGES[1]])
def test_weights_of_a_training_checkpoint_are_those_of_a_model_that_is_loaded_at_once(tmp_path, changes):
    write_start_checkpoint(tiny_model("gpt2", vocab_size=50), "nvfp4", tmp_path / "start")
    check(ModelSettings(checkpoint=tmp_path / "start", **changes))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_override_ties_equal_weights_and_refuses_others(tmp_path, kind):
    """Of a folder and of a training checkpoint, at once and later."""
    model = tiny_model(kind, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "hf")
    write_start_checkpoint(model, "nvfp4", tmp_path / "start")
    for folder in (tmp_path / "hf", tmp_path / "start"):
        settings = ModelSettings(checkpoint=folder, overrides={"tie_word_embeddings": True})
        for read in (
            lambda given: build_model(given, seed=0),
            lambda given: start_model(given, seed=0)[1].open(),
        ):
            with pytest.raises(UserError, match=r"ties lm_head\.weight to .*, but their values differ"):
                read(settings)
    model.lm_head.weight.data.copy_(model.get_input_embeddings().weight)
    write_start_checkpoint(model, "nvfp4", tmp_path / "equal")
    settings = ModelSettings(checkpoint=tmp_path / "equal", overrides={"tie_word_embeddings": True})
    check(settings)
    found = build_model(settings, seed=0)
    assert found.lm_head.weight is found.get_input_embeddings().weight
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)


def test_nothing_is_read_before_weights_are_opened_and_nothing_ever_for_a_resumed_run(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    settings = ModelSettings(checkpoint=tmp_path)
    _, weights = start_model(settings, seed=0)
    with pytest.raises(UserError, match=r"cannot be loaded"):
        weights.open()
    _, weights = start_model(settings, seed=0, reads_weights=False)
    assert weights.open is None


def test_a_weight_that_is_not_finite_is_named_when_it_is_read(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = load_file(file)
    content["transformer.h.1.mlp.c_fc.weight"][3, 5] = float("nan")
    save_file(content, file, metadata={"format": "pt"})
    opened = start_model(ModelSettings(checkpoint=tmp_path), seed=0)[1].open()
    assert opened["transformer.wte.weight"].isfinite().all()
    with pytest.raises(
        UserError, match=r"weight transformer\.h\.1\.mlp\.c_fc\.weight has 1 values that are NaN"
    ):
        opened["transformer.h.1.mlp.c_fc.weight"]


def test_a_folder_without_its_configuration_or_with_too_many_outliers_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match=r"is not a folder"):
        start_model(ModelSettings(checkpoint=tmp_path / "none"), seed=0)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("gpt2").to_dict()))
    settings = ModelSettings(config=tmp_path / "config.json", outliers=OutlierSettings(channels=1000))
    with pytest.raises(UserError, match=r"outliers\.channels = 1000 is above"):
        start_model(settings, seed=0)
