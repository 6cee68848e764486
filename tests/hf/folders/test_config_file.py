import copy
import json

import pytest
import torch
from tiny_models import KINDS, tiny_config
from transformers import GPT2Config, LlamaConfig

from megalowbit.errors import UserError
from megalowbit.hf.folders.config_file import config_from_dict
from megalowbit.hf.model import random_model
from megalowbit.json_text import read_json_object

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64}
LLAMA = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_layer=3, resid_pdrop=0.25),
        LlamaConfig(num_hidden_layers=3),
        *(tiny_config(kind) for kind in KINDS),
    ],
    ids=lambda config: config.model_type,
)
def test_a_configuration_saved_by_transformers_is_read_back_equal(tmp_path, config):
    config.save_pretrained(tmp_path)
    raw = read_json_object(tmp_path / "config.json")
    assert config_from_dict(raw, {}, "x", is_strict=True).to_dict() == type(config).from_dict(raw).to_dict()


# fields as the files of these models have them; parameters as their authors count them
PUBLISHED = {
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {
            "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
            "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_strictly_and_give_models_of_their_size(name):
    count, fields = PUBLISHED[name]
    config = config_from_dict(fields, {}, "x", is_strict=True)
    model = random_model(config, seed=0, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_overrides_replace_fields_by_their_own_or_their_common_name():
    config = config_from_dict(GPT2, {"n_layer": 5, "hidden_size": 32, "resid_pdrop": 0.0}, "x")
    assert (config.n_layer, config.n_embd, config.resid_pdrop) == (5, 32, 0.0)
    assert config_from_dict(LLAMA, {"rope_theta": 5e5}, "x").rope_parameters["rope_theta"] == 5e5


OLD_ROPE = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
NEW_ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}


@pytest.mark.parametrize("stored", [OLD_ROPE, NEW_ROPE], ids=["older file", "file of transformers 5"])
@pytest.mark.parametrize(
    ("overrides", "theta", "factor"),
    [
        ({"rope_theta": 1e6}, 1e6, 2.0),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 5e5, 4.0),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e6}, 1e6, 4.0),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}}, 1e6, 4.0),
        ({"rope_scaling": None}, 5e5, 1.0),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 5e5, 4.0),
        ({"rope_parameters": None, "rope_theta": 1e6}, 1e6, 1.0),
        ({"hidden_size": 32, "num_attention_heads": 4}, 5e5, 2.0),
    ],
)
def test_rotary_positions_turn_by_the_overridden_angles(stored, overrides, theta, factor):
    """Linear scaling divides positions by the factor."""
    raw, given = {**LLAMA, "vocab_size": 8, "intermediate_size": 8, **stored}, copy.deepcopy(overrides)
    before = copy.deepcopy(raw)
    config = config_from_dict(raw, given, "x", is_strict=True)
    found = random_model(config, seed=0).model.rotary_emb.inv_freq
    expected = torch.tensor([theta ** (-2 * i / 8) / factor for i in range(4)], dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert (raw, given) == (before, overrides)  # nothing is added to what was given


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen2", {"max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": None}),
        ("qwen3", {"num_hidden_layers": 4}),
        ("qwen3", {"hidden_size": 64}),  # whose head size depends on nothing
        *((kind, {"hidden_size": 64}) for kind in ("llama", "mistral", "qwen2")),
        *((kind, {"num_attention_heads": 8}) for kind in ("llama", "mistral", "qwen2")),
        ("llama", {"hidden_size": 64, "head_dim": 4}),
        ("qwen2", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
    ],
)
def test_what_a_saved_file_derives_is_derived_again(kind, overrides):
    """The file has all fields; the reference is built with the overrides and has never been saved."""
    raw = json.loads(json.dumps(tiny_config(kind).to_dict()))
    assert config_from_dict(raw, overrides, "x").to_dict() == tiny_config(kind, **overrides).to_dict()


@pytest.mark.parametrize(
    ("kind", "stored", "expected"),
    [
        ("llama", None, 8),  # as many as query heads
        ("llama", 2, 2),
        ("mistral", 8, 8),  # these classes have a number of their own
        ("qwen2", 4, 4),
        ("qwen3", 4, 4),
    ],
)
def test_heads_of_keys_and_values_follow_those_of_queries_unless_they_are_grouped(kind, stored, expected):
    raw = json.loads(json.dumps(tiny_config(kind, num_key_value_heads=stored).to_dict()))
    config = config_from_dict(raw, {"num_attention_heads": 8}, "x")
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_override_that_repeats_a_field_changes_nothing(kind):
    config = tiny_config(kind)
    raw = json.loads(json.dumps(config.to_dict()))
    aliases = {alias: raw[name] for alias, name in config.attribute_map.items() if name in raw}
    for name, value in {**raw, **aliases}.items():
        if name != "model_type":
            assert config_from_dict(raw, {name: value}, "x").to_dict() == config.to_dict(), name
    for name in ("eager", "sdpa", "flash_attention_2"):
        assert config_from_dict(raw, {"attn_implementation": name}, "x")._attn_implementation == name


OWN_LAYERS = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("kind", "stored", "overrides", "message"),
    [
        (
            "qwen2",
            {"use_sliding_window": False},
            {"sliding_window": 8},
            "sliding_window 8 has no effect, the",
        ),
        ("qwen2", OWN_LAYERS, {"max_window_layers": 0}, "max_window_layers 0 has no effect, because x has"),
        (
            "llama",
            {},
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}},
            r"rope_theta 1000000\.0 has no effect, the model would have rope_parameters \{.*100000\.0",
        ),
        (
            "llama",
            {},
            {"rope_scaling": None, "rope_parameters": NEW_ROPE["rope_parameters"]},
            "rope_scaling None",
        ),
        (
            "gpt2",
            {},
            {"hidden_size": 64, "n_embd": 32},
            "hidden_size 64 has no effect, .* n_embd 32: override",
        ),
        ("llama", {}, {"transformers_version": "4.0"}, r"transformers_version '4\.0' has no effect"),
    ],
)
def test_an_override_without_effect_is_refused(kind, stored, overrides, message):
    raw = tiny_config(kind, **stored).to_dict()
    with pytest.raises(UserError, match=rf"^model\.overrides\.{message}"):
        config_from_dict(raw, overrides, "x")


def test_a_scaling_of_positions_must_be_an_object():
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UserError, match=f"x: {name} must be null or an object such as .*, not 'linear'"):
            config_from_dict(LLAMA, {name: "linear"}, "x")


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_scaling_of_positions_must_name_its_type(name):
    message = rf"^x: {name} \{{.*4\.0.*\}} has no rope_type, so it has no effect: name its rope_type"
    for scaling in ({"factor": 4.0}, {"factor": 4.0, "rope_theta": 1e6, "rope_type": None}):
        with pytest.raises(UserError, match=message):
            config_from_dict(LLAMA, {name: scaling}, "x")
        with pytest.raises(UserError, match=message):
            config_from_dict({**LLAMA, name: scaling}, {}, "x", is_strict=True)
        config_from_dict({**LLAMA, name: scaling}, {}, "x")  # a checkpoint, trained without the scaling
    without_scaling = {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert config_from_dict(LLAMA, {name: without_scaling}, "x").rope_parameters["rope_theta"] == 1e6


def test_a_common_name_in_the_file_is_overridden_too():
    raw = {"model_type": "gpt2", "hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64}
    assert config_from_dict(raw, {"n_embd": 32}, "x", is_strict=True).n_embd == 32


def test_a_misspelt_field_is_rejected_with_the_nearest_name():
    with pytest.raises(UserError, match=r"x\.json: unknown field 'n_layers': did you mean 'n_layer'\?"):
        config_from_dict({**GPT2, "n_layers": 2}, {}, "x.json", is_strict=True)
    with pytest.raises(UserError, match=r"model\.overrides 'num_layers': did you mean 'n_layer'\?"):
        config_from_dict(GPT2, {"num_layers": 2}, "x.json")
    with pytest.raises(UserError, match=r"unknown field in model\.overrides 'n_ctx'"):
        config_from_dict(GPT2, {"n_ctx": 2}, "x.json")  # transformers would ignore it


def test_fields_of_other_transformers_versions_are_accepted():
    assert config_from_dict({**GPT2, "some_new_switch": True}, {}, "x").n_layer == 2
    assert (
        config_from_dict({**GPT2, "n_ctx": 1024, "torch_dtype": "float16"}, {}, "x", is_strict=True).n_layer
        == 2
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"n_layer": 2}, 'x has no "model_type": add "gpt2" or "llama"'),
        ({"model_type": "bert"}, "unknown model_type 'bert'"),
        ({**GPT2, "n_layer": "two"}, "x is not a valid gpt2 configuration: .*n_layer"),
        ({**GPT2, "n_layer": 2.5}, "x is not a valid gpt2 configuration: .*n_layer"),
        ({**GPT2, "n_embd": 17}, "n_head 2 must divide n_embd 17"),
        ({**LLAMA, "hidden_size": 17}, "x is not a valid llama configuration: .*not a multiple"),
        ({**LLAMA, "head_dim": 5}, "x is not a valid llama configuration: .*even rotary dimension"),
        ({**GPT2, "dtype": "float17"}, "x is not a valid gpt2 configuration: .*float17"),
    ],
)
def test_a_wrong_configuration_is_a_one_line_error(raw, message):
    with pytest.raises(UserError, match=message) as caught:
        config_from_dict(raw, {}, "x")
    assert "\n" not in str(caught.value)


def test_the_family_cannot_be_overridden():
    with pytest.raises(UserError, match=r"unknown field in model\.overrides 'model_type'(?!.*'model_type')"):
        config_from_dict(GPT2, {"model_type": "llama"}, "x")
