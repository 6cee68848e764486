"""Configurations from Megatron-LM's arguments; test_megatron compares their models with megatron-core."""

import pytest

from megalowbit.errors import UserError
from megalowbit.hf.folders.config_file import config_from_dict
from megalowbit.hf.importers.megatron_config import config_from_arguments, merged_config

GPT2 = {
    "num_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "layernorm_epsilon": 1e-6,
    "hidden_dropout": 0.2,
    "attention_dropout": 0.3,
}
LLAMA = {
    **GPT2,
    "ffn_hidden_size": 100,
    "position_embedding_type": "rope",
    "rotary_base": 500_000,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}


def test_gpt2_of_an_old_version():
    found = config_from_arguments(GPT2, 64, "x")
    config = config_from_dict(found, {}, "x")
    assert (config.n_layer, config.n_embd, config.n_head, config.n_positions) == (3, 48, 6, 128)
    assert (config.n_inner, config.vocab_size, config.tie_word_embeddings) == (192, 64, True)
    assert (config.layer_norm_epsilon, config.activation_function) == (1e-6, "gelu_new")
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.2, 0.2, 0.3)
    assert config.eos_token_id is None


def test_llama_with_groups_of_heads():
    config = config_from_dict(config_from_arguments({**LLAMA, "kv_channels": 16}, 64, "x"), {}, "x")
    assert (config.model_type, config.num_key_value_heads, config.head_dim) == ("llama", 2, 16)
    assert (config.intermediate_size, config.rms_norm_eps, config.tie_word_embeddings) == (100, 1e-6, False)
    assert config.rope_parameters["rope_theta"] == 500_000
    assert (config.attention_bias, config.mlp_bias) == (False, False)


def test_groups_without_their_switch_have_no_effect():
    """`num_query_groups` is 1 by default."""
    found = config_from_arguments({**LLAMA, "group_query_attention": False, "num_query_groups": 1}, 64, "x")
    assert found["num_key_value_heads"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**LLAMA, "qk_l2_norm": True}, "x was trained with qk_l2_norm True: no supported model has it"),
        ({**LLAMA, "glu_linear_offset": 1.0}, "x was trained with glu_linear_offset 1.0"),
        ({**LLAMA, "activation_func_clamp_value": 7.0}, "x was trained with activation_func_clamp_value 7.0"),
        ({**LLAMA, "num_experts": 4}, "x was trained with num_experts 4: no supported model has it"),
        ({**LLAMA, "multi_latent_attention": True}, "with multi_latent_attention True"),
        ({**LLAMA, "rotary_interleaved": True}, "with rotary_interleaved True"),
        ({**LLAMA, "rotary_percent": 0.5}, "with rotary_percent 0.5"),
        ({**LLAMA, "window_size": (128, 0)}, r"with window_size \(128, 0\)"),
        ({**GPT2, "apply_layernorm_1p": True}, "with apply_layernorm_1p True"),
        ({**GPT2, "squared_relu": True}, "with squared_relu True"),
        ({**LLAMA, "add_qkv_bias": True}, "x has add_qkv_bias"),
        ({**LLAMA, "qk_layernorm": True, "add_bias_linear": True}, "x has qk_layernorm and biases"),
        ({**LLAMA, "normalization": "LayerNorm"}, "x has rope positions, LayerNorm and SwiGLU"),
        ({**LLAMA, "swiglu": False}, "x has rope positions, RMSNorm and GELU"),
        ({**GPT2, "position_embedding_type": "none"}, "x has none positions, LayerNorm and GELU"),
        (
            {**GPT2, "group_query_attention": True, "num_query_groups": 2},
            "positions and group_query_attention",
        ),
        ({**GPT2, "kv_channels": 16}, "learned positions and kv_channels"),
        ({**GPT2, "add_bias_linear": False}, "learned positions and disable_bias_linear"),
        ({**GPT2, "disable_bias_linear": True}, "learned positions and disable_bias_linear"),
        ({**GPT2, "hidden_size": None}, "x has hidden_size None in its arguments"),
        ({**GPT2, "num_layers": True}, "x has num_layers True in its arguments"),
    ],
)
def test_a_model_of_no_supported_family_is_refused_by_the_argument(arguments, message):
    with pytest.raises(UserError, match=message):
        config_from_arguments(arguments, 64, "x")


def test_a_given_configuration_completes_but_does_not_contradict():
    derived = config_from_arguments(LLAMA, 64, "x")
    given = {"model_type": "llama", "vocab_size": 61, "eos_token_id": 2, "hidden_size": 48}
    merged = merged_config(derived, given, "x")
    assert (merged["vocab_size"], merged["eos_token_id"], merged["num_hidden_layers"]) == (61, 2, 3)
    assert merged_config(derived, None, "x") == derived
    for name, value in {"hidden_size": 64, "vocab_size": 65, "model_type": "gpt2"}.items():
        with pytest.raises(
            UserError, match=f"x does not fit the configuration: {name} is .* in the checkpoint's"
        ):
            merged_config(derived, {name: value}, "x")


SCALED = {**LLAMA, "use_rope_scaling": True, "rope_scaling_factor": 8.0}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (LLAMA, {"rope_theta": 10_000.0}),
        (LLAMA, {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 8.0}}),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
        (SCALED, {"rope_theta": 500_000.0, "rope_scaling": None}),
        (SCALED, {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 32.0}}),
    ],
)
def test_rotary_positions_of_a_given_configuration_must_be_those_of_the_arguments(arguments, given):
    derived = config_from_arguments(arguments, 64, "x")
    with pytest.raises(UserError, match=r"^x does not fit .*: rope_parameters is .* and .* in --config$"):
        merged_config(derived, given, "x")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (LLAMA, {"rope_theta": 500_000, "rope_scaling": None}),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000}}),
        (SCALED, {"rope_theta": 500_000.0, "rope_scaling": {"type": "llama3", **LLAMA3}}),
        (SCALED, {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    ],
)
def test_rotary_positions_of_a_given_configuration_may_have_the_form_of_any_version(arguments, given):
    derived = config_from_arguments(arguments, 64, "x")
    assert merged_config(derived, given, "x") == derived


def test_a_given_gpt2_may_be_one_that_transformers_has_saved_but_not_contradict_under_a_common_name():
    derived = config_from_arguments(GPT2, 64, "x")
    saved = config_from_dict(derived, {"n_inner": None, "eos_token_id": 5}, "x").to_dict()
    given = {name: value for name, value in saved.items() if name not in ("architectures", "bos_token_id")}
    config = config_from_dict(merged_config(derived, given, "x"), {}, "x")
    assert (config.n_inner, config.eos_token_id, config.n_layer) == (None, 5, 3)
    with pytest.raises(UserError, match=r"n_head is 6 in the checkpoint's arguments and 4 in --config"):
        merged_config(derived, {"num_attention_heads": 4}, "x")
    wide = config_from_arguments({**GPT2, "ffn_hidden_size": 100}, 64, "x")
    with pytest.raises(UserError, match=r"n_inner is 100 in the checkpoint's arguments and None"):
        merged_config(wide, given, "x")
