"""The Hugging Face configuration of a Megatron-LM model, from the arguments saved in its checkpoint.

Megatron-LM saves all arguments of the training program, as attributes of an `argparse.Namespace`. An argument
that changes the model and has no counterpart in a supported family is rejected by name, because its weights
would load and compute something else.

| Megatron-LM | family |
|---|---|
| learned positions, LayerNorm, GELU, biases | `gpt2` |
| rotary positions, RMSNorm, SwiGLU | `llama` |
| the same, with norms on each head's q and k | `qwen3` |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalowbit.errors import UserError, shown
from megalowbit.families.registry import family
from megalowbit.hf.folders.config_file import with_changes

# Arguments that must have one of these values: others describe a model that no supported family has.
NEEDED: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "multi_latent_attention": (None, False),
    "mtp_num_layers": (None, 0),
    "apply_layernorm_1p": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "squared_relu": (None, False),
    "quick_geglu": (None, False),
    "glu_linear_offset": (None, 0, 0.0),
    "activation_func_clamp_value": (None,),
    "qk_l2_norm": (None, False),
    "attention_output_gate": (None, False),
    "rotary_interleaved": (None, False),
    "rotary_percent": (None, 1, 1.0),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "rope_type": (None, "rope"),
    "no_rope_freq": (None, 0),
    "window_size": (None,),
    "softmax_type": (None, "vanilla"),
    "spec": (None,),
    "hybrid_override_pattern": (None, ""),
    "hybrid_layer_pattern": (None, ""),
    "heterogeneous_layers_config_path": (None,),
    "experimental_attention_variant": (None,),
}
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def config_from_arguments(arguments: Mapping[str, Any], vocab_size: int, where: str) -> dict[str, Any]:
    """Fields of the Hugging Face configuration.

    Args:
        arguments: those of the training program.
        vocab_size: rows of the embedding, which may be padded.
        where: the checkpoint, for messages.

    Raises:
        UserError: an argument is missing, or no supported family is this model.
    """
    for name, values in NEEDED.items():
        value = arguments.get(name)
        if not any(type(value) is type(each) and value == each for each in values):
            raise UserError(f"{where} was trained with {name} {shown(value)}: no supported model has it")
    for name in SIZES:
        if type(arguments.get(name)) is not int:
            raise UserError(
                f"{where} has {name} {shown(arguments.get(name))} in its arguments: use a complete checkpoint"
            )
    if type(padded := arguments.get("padded_vocab_size")) is int and padded != vocab_size:
        raise UserError(
            f"{where} has {vocab_size:,} word embeddings, and {padded:,} by its arguments: use a complete one"
        )
    is_rotary = arguments.get("position_embedding_type") == "rope" or bool(
        arguments.get("use_rotary_position_embeddings")
    )
    traits = (
        "rope" if is_rotary else arguments.get("position_embedding_type", "learned_absolute"),
        arguments.get("normalization") or "LayerNorm",
        "SwiGLU" if arguments.get("swiglu") else "GELU",
    )
    common = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights", False),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if traits == ("learned_absolute", "LayerNorm", "GELU"):
        return _gpt2(arguments, where) | common
    if traits == ("rope", "RMSNorm", "SwiGLU"):
        return _llama(arguments, where) | common
    raise UserError(
        f"{where} has {' positions, '.join(traits[:2])} and {traits[2]}: no supported family has these; gpt2 "
        "has learned_absolute positions, LayerNorm and GELU, and llama has rope positions, RMSNorm and SwiGLU"
    )


def merged_config(derived: dict[str, Any], given: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """The derived fields and those of a `config.json` that the user named, which must not contradict them.

    A smaller `vocab_size` is no contradiction: Megatron-LM pads the vocabulary.

    Raises:
        UserError: a field differs, under whichever name the file has it.
    """
    merged = with_changes(derived, given or {}, family(derived["model_type"]).load_config_class(), where)
    for name, known in derived.items():
        value = merged[name]
        is_padding = name == "vocab_size" and type(value) is int and value <= known
        is_default = name == "n_inner" and value is None and known == 4 * derived["n_embd"]
        if known is not None and value != known and not is_padding and not is_default:
            raise UserError(
                f"{where} does not fit the configuration: {name} is {shown(known)} in the checkpoint's "
                f"arguments and {shown(value)} in --config"
            )
    return merged


def _epsilon(arguments: Mapping[str, Any]) -> float:
    """The norms' epsilon, which older versions call `layernorm_epsilon`."""
    value = arguments.get("norm_epsilon", arguments.get("layernorm_epsilon"))
    return 1e-5 if value is None else float(value)


def _head_size(arguments: Mapping[str, Any]) -> int:
    return int(arguments.get("kv_channels") or arguments["hidden_size"] // arguments["num_attention_heads"])


def _groups(arguments: Mapping[str, Any]) -> int:
    """Number of key and value heads; the argument has a value without effect if groups are off."""
    is_grouped = arguments.get("group_query_attention")
    return int(arguments["num_query_groups"] if is_grouped else arguments["num_attention_heads"])


def _gpt2(arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    hidden_size, heads = arguments["hidden_size"], arguments["num_attention_heads"]
    refused = {
        "group_query_attention": _groups(arguments) != heads,
        "kv_channels": _head_size(arguments) * heads != hidden_size,
        "disable_bias_linear": not _has_bias(arguments),
        "qk_layernorm": bool(arguments.get("qk_layernorm")),
    }
    for name, is_wrong in refused.items():
        if is_wrong:
            raise UserError(f"{where} has learned positions and {name}: no supported family has both")
    is_tanh = arguments.get("bias_gelu_fusion", True) or arguments.get("openai_gelu", False)
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": arguments["num_layers"],
        "n_embd": hidden_size,
        "n_head": heads,
        "n_positions": arguments["max_position_embeddings"],
        "n_inner": arguments.get("ffn_hidden_size") or 4 * hidden_size,
        # the fused kernel computes GELU with tanh, the unfused operation with erf
        "activation_function": "gelu_new" if is_tanh else "gelu",
        "layer_norm_epsilon": _epsilon(arguments),
        "attn_pdrop": arguments.get("attention_dropout", 0.1),
        "embd_pdrop": arguments.get("hidden_dropout", 0.1),
        "resid_pdrop": arguments.get("hidden_dropout", 0.1),
    }


def _llama(arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    is_qwen3 = bool(arguments.get("qk_layernorm"))
    has_bias = _has_bias(arguments)
    if arguments.get("add_qkv_bias") and not has_bias:
        raise UserError(
            f"{where} has add_qkv_bias, biases of q, k and v alone: no supported family has these"
        )
    if is_qwen3 and has_bias:
        raise UserError(f"{where} has qk_layernorm and biases: no supported family has both")
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(arguments.get("rotary_base") or 10_000),
    }
    if arguments.get("use_rope_scaling"):  # Megatron-LM has only LLaMA 3's, with these numbers
        rope |= {
            "rope_type": "llama3",
            "factor": float(arguments.get("rope_scaling_factor") or 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    fields = {
        "model_type": "qwen3" if is_qwen3 else "llama",
        "architectures": ["Qwen3ForCausalLM" if is_qwen3 else "LlamaForCausalLM"],
        "num_hidden_layers": arguments["num_layers"],
        "hidden_size": arguments["hidden_size"],
        "num_attention_heads": arguments["num_attention_heads"],
        "num_key_value_heads": _groups(arguments),
        "head_dim": _head_size(arguments),
        "intermediate_size": arguments["ffn_hidden_size"],
        "max_position_embeddings": arguments["max_position_embeddings"],
        "hidden_act": "silu",
        "rms_norm_eps": _epsilon(arguments),
        "rope_parameters": rope,
        "attention_bias": has_bias,
        "attention_dropout": arguments.get("attention_dropout", 0.0),
    }
    return fields if is_qwen3 else {**fields, "mlp_bias": has_bias}


def _has_bias(arguments: Mapping[str, Any]) -> bool:
    """Whether linear layers have biases; older versions save the opposite."""
    return bool(arguments.get("add_bias_linear", not arguments.get("disable_bias_linear", False)))
